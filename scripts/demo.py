"""The first of the README's two commands: the main job, on real vLLM, from nothing.

    python3 scripts/demo.py [--samples N] [--output DIRECTORY] ...

Sets up the environment if it isn't there, then runs examples/smollm2_states/run.py in
it; that one gets the options. Exit status 0 means that every row is right.
"""

from __future__ import annotations

import subprocess
import sys

from environment import ROOT, child_environment, ensure, guarded, say


def main() -> int:
    python = ensure("demo")
    say("[0/4] Environment ready")
    options = sys.argv[1:]
    if not any(option.startswith("--output") for option in options):
        options = ["--output", str(ROOT / "demo-output"), *options]
    command = [str(python), str(ROOT / "examples" / "smollm2_states" / "run.py"), *options]
    return subprocess.run(command, env=child_environment(), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(guarded(main))
