"""A generator under conditions of a test; prints what was found, as JSON.

python -m machines.generate CHECKPOINT CONDITIONS
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

ROW_TOLERANCE = 0.05  # as in tests/rows: noise is 0.3 to 1.5 %, another token's row 100 %


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def main(folder: Path, conditions: dict[str, Any]) -> dict[str, Any]:
    import torch

    for name in conditions.get("without", ()):
        delattr(os, name)
    for name in conditions.get("refused", ()):
        setattr(os, name, refuse)
    right = torch.load(folder / "right.pt")

    import vllm_compat

    vllm_compat.apply(transport=conditions.get("transport"))
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    logging.basicConfig(level=logging.INFO)
    made = None
    with contextlib.ExitStack() as stack:
        if device := conditions.get("set_default_device"):
            torch.set_default_device(device)
        if device := conditions.get("with_device"):
            stack.enter_context(torch.device(device))
        if dtype := conditions.get("dtype"):
            torch.set_default_dtype(getattr(torch, dtype))
        before = torch.empty(0)
        try:
            made = VllmHiddenStatesGenerator(
                str(folder), layer_ids=right["layer_ids"], max_model_len=2200
            )
            (worker,) = vllm_compat.status().workers
            batches = [
                made.generate(right["prompts"]) for _ in range(conditions.get("batches", 2))
            ]
        except Exception as error:
            if made is not None:
                made.executor.shutdown()
            return {"error": f"{type(error).__name__}: {error}"}
        after = torch.empty(0)
    worst = 0.0
    devices = set()
    for results in batches:
        for result, ids, states in zip(results, right["prompts"], right["states"], strict=True):
            devices |= {t.device.type for t in (result["input_ids"], *result["hidden_states"])}
            assert result["input_ids"].tolist() == ids
            for got, want in zip(result["hidden_states"], states, strict=True):
                off = (got.float() - want).norm(dim=-1) / want.norm(dim=-1)
                worst = max(worst, float(off.max()))
    made.executor.shutdown()
    return {
        "worker": worker,
        "right": worst < ROW_TOLERANCE,
        "worst": worst,
        "devices": sorted(devices),
        "defaults kept": (before.device, before.dtype) == (after.device, after.dtype),
    }


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.write(f"FOUND {json.dumps(found, default=str)}\n")
    sys.stdout.flush()
