"""Every family: each row of each layer is what transformers computes.

The generator is speculators' own, on the vLLM that is installed, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cores import all_cores
from packaging.specifiers import SpecifierSet

import vllm_compat

from .registry import FAMILIES, PROMPT_LENGTHS, Family

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parents[1]
TIMEOUT = 420
RECORDED = ("refused", "vllm_class", "layers", "convention", "dtype", "versions")


def cases(*, tensor_parallel: bool) -> Iterator[Any]:
    for family in FAMILIES:
        if tensor_parallel and not family.tensor_parallel:
            continue
        for dtype in family.dtypes[:1] if tensor_parallel else family.dtypes:
            marks = [] if family.fast else [pytest.mark.slow_families]
            if family.vllm:
                installed = vllm_compat.status(workers=False).environment.vllm
                release = installed.release if installed else None
                fits = release and SpecifierSet(family.vllm).contains(release)
                marks.append(
                    pytest.mark.skipif(not fits, reason=f"vLLM {family.vllm} has this model")
                )
            yield pytest.param(family, dtype, id=f"{family.name}-{dtype}", marks=marks)


@pytest.mark.parametrize(("family", "dtype"), list(cases(tensor_parallel=False)))
def test_rows_are_those_of_transformers(
    family: Family, dtype: str, checkpoint_cache: Path, workaround_path: Path, tmp_path: Path
) -> None:
    check(family, dtype, 1, checkpoint_cache, workaround_path, tmp_path)


@pytest.mark.parametrize(("family", "dtype"), list(cases(tensor_parallel=True)))
def test_two_ranks(
    family: Family, dtype: str, checkpoint_cache: Path, workaround_path: Path, tmp_path: Path
) -> None:
    """``tensor_parallel_size=2``: right, and sent by one rank only."""
    with all_cores():
        check(family, dtype, 2, checkpoint_cache, workaround_path, tmp_path)


def check(
    family: Family, dtype: str, ranks: int, cache: Path, workaround_path: Path, tmp_path: Path
) -> None:
    # Not at the top: it imports torch and transformers, which collecting needs not.
    from . import checkpoints

    folder = checkpoints.make(family, dtype, cache)
    result = generate(family, dtype, ranks, folder, workaround_path, tmp_path)
    if family.refused or "refused" in result:
        assert family.refused, f"refused: {result['refused']}"
        assert family.refused in result["refused"]
        record(family, dtype, ranks, result)
        return
    assert result["vllm_class"] == family.vllm_class
    assert result["workers"] == ranks
    assert result["senders"] == [0]
    assert result["dtype"] == ("bfloat16" if dtype == "auto" else dtype)
    assert result["reported_dtype"] == result["dtype"]
    if family.tokenizer:
        assert result["tokenizer"] == family.tokenizer
    errors = result["errors"]
    assert len(errors) == len(PROMPT_LENGTHS)
    allowed = family.allowed(result["dtype"])
    wrong = {
        f"prompt {prompt}, layer {layer}": error
        for prompt, layers in enumerate(errors)
        for layer, error in enumerate(layers)
        # Written so that NaN is wrong.
        if not error <= allowed
    }
    assert not wrong, f"rows off by more than {allowed}: {wrong}"
    record(family, dtype, ranks, result)


def generate(
    family: Family, dtype: str, ranks: int, folder: Path, workaround_path: Path, tmp_path: Path
) -> dict[str, Any]:
    """Run ``case.py``; return what it wrote."""
    from .cpu_workarounds import VARIABLE

    workarounds = list(family.workarounds)
    if dtype == "float32":
        workarounds.append("keep_float32")
    paths = [str(TESTS), str(workaround_path), os.environ.get("PYTHONPATH", "")]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        **family.env,
        VARIABLE: ",".join(workarounds),
        # transformers files remote code under the name of the checkpoint's folder, which is
        # the same for all of them here.
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    if ranks > 1:
        # One core for each rank: found without the user's help, and without ours.
        environment.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    output, log = tmp_path / "result.json", tmp_path / "log.txt"
    command = [sys.executable, "-m", "families.case", str(folder), str(output), str(ranks)]
    with log.open("w") as file:
        done = subprocess.run(
            command,
            env=environment,
            # Not the top of the repository: ``-m`` would put it before what is installed.
            cwd=tmp_path,
            # A question on stdin (remote code) would find no answer.
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            check=False,
        )
    if done.returncode != 0 or not output.exists():
        tail = "\n".join(log.read_text().splitlines()[-60:])
        pytest.fail(f"{family.name} ({dtype}) exited with {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def record(family: Family, dtype: str, ranks: int, result: dict[str, Any]) -> None:
    """Append the result to the file of ``VLLM_COMPAT_FAMILY_RESULTS``, if it is set."""
    path = os.environ.get("VLLM_COMPAT_FAMILY_RESULTS")
    if not path:
        return
    line = {"family": family.name, "checkpoint": dtype, "ranks": ranks}
    line |= {key: result[key] for key in RECORDED if key in result}
    if "errors" in result:
        largest = max(max(layers) for layers in result["errors"])
        line["largest_error"] = float(f"{largest:.1e}")
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")
