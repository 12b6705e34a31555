"""Runs code in processes of its own.

A fresh interpreter needs seconds for the imports of torch and transformers. Where a test is
about vLLM, speculators and this package alone, a process is forked from one that has done
those imports and none of theirs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
HANGS = 600.0  # seconds; imports and an engine's start take minutes on a busy machine
PRELOADED = (
    "torch",
    "torch._inductor.compile_fx",
    "torch._dynamo",
    "torch.distributed",
    "transformers",
    "transformers.models.auto",
    "transformers.modeling_utils",
    "pydantic",
    "fastapi",
    "openai",
    "datasets",
    "torchvision",
    "PIL.Image",
    "msgspec",
    "zmq",
    "safetensors.torch",
    "huggingface_hub",
    "cv2",
    "xgrammar",
    "numba",
)


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without our variables, with some changes."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_COMPAT_")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # byte code saves each process seconds
    paths = [str(TESTS), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def python(
    code: str, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = HANGS
) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter; fails the test if it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=dict(env) if env is not None else environment(),
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


class Zygote:
    """A process that forks others."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "guest.processes"],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls ``module:function`` in a new process.

        Returns:
            What it returns, through JSON.

        Raises:
            AssertionError: it raised an exception, or died.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([function, arguments]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import torch

    # Some ask for CUDA's devices, after which no forked process could use them.
    count, torch._C._cuda_getDeviceCount = torch._C._cuda_getDeviceCount, lambda: 0
    for name in PRELOADED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    torch._C._cuda_getDeviceCount = count
    theirs = [
        m for m in sys.modules if m.split(".")[0] in ("vllm", "speculators", "vllm_compat")
    ]
    for line in sys.stdin:
        function, arguments = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                if theirs:
                    raise RuntimeError(f"the parent has imported {theirs}")
                module, _, name = function.partition(":")
                answer = {"result": getattr(importlib.import_module(module), name)(*arguments)}
            except BaseException:
                answer = {"error": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        status = os.waitpid(child, 0)[1]
        answers.write((text or json.dumps({"error": f"it ended with status {status}"})) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
