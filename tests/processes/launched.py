"""One rank of a launcher. python -m processes.launched CHECKPOINT FOLDER both|first"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from processes.generators import changed, environment_of, imported, make, states


def main(checkpoint: str, folder: str, who: str) -> None:
    from torch import distributed

    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")  # as a script does that needs a launcher
    imported()
    before = dict(os.environ)
    found: dict[str, Any] = {}
    if who == "both" or rank == 0:
        generator = make(checkpoint)
        found["rows"] = states(generator)
        (found["worker"],) = generator.executor.collective_rpc(environment_of)
        generator.executor.shutdown()
    found["changed"] = changed(before)
    found["ranks"] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found["ranks"], rank)  # the launcher's own group still works
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
