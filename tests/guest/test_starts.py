"""Generators in processes and threads of every kind, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .processes import Zygote, environment, python

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "guest.starts", str(checkpoint)],
        env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = (part for part in done.stdout.splitlines() if part.startswith("FOUND "))
    return {**json.loads(line.removeprefix("FOUND ")), "output": done.stdout + done.stderr}


@pytest.mark.engine
@pytest.mark.parametrize(
    "when", ["after it was made", "after it generated", "after it was shut down", "at the end"]
)
def test_the_process_is_as_it_was(found: Any, when: str) -> None:
    """Variables, threads, random numbers, signals, affinity, start method."""
    assert found[when] == []


@pytest.mark.engine
def test_a_variable_that_another_thread_sets_meanwhile_stays(found: Any) -> None:
    assert found["somebody else's"] == "1"


@pytest.mark.engine
def test_nothing_is_left_over(found: Any) -> None:
    """No process, no thread, no shared memory, no descriptor of ours."""
    assert found["left over"] == []


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["thread", "fork", "spawn", "forkserver"])
def test_the_same_rows_in_every_kind_of_process(found: Any, kind: str) -> None:
    assert found["rows"][kind] == found["rows"]["here"]


@pytest.mark.engine
def test_a_daemonic_process_is_told_so(found: Any) -> None:
    """multiprocessing.Pool makes such: they may not have children, as vLLM has workers."""
    assert found["daemon"].startswith("UnsupportedEnvironmentError")
    assert "daemon" in found["daemon"]


@pytest.mark.engine
def test_status_asks_the_workers(found: Any) -> None:
    (worker,) = found["status"]
    assert worker["captures"] == [0, 2]
    assert worker["pid"] != found["pid"]


@pytest.mark.engine
def test_a_worker_has_what_it_needs_and_no_more(found: Any) -> None:
    (worker,) = found["workers"]
    assert not worker["speculators"]
    assert not worker["applied"]


@pytest.mark.engine
def test_a_worker_says_once_what_it_captures(found: Any) -> None:
    lines = [line for line in found["output"].splitlines() if "captures layers" in line]
    generators = 6  # two in main, one each in a thread and the three kinds of children
    assert len(lines) == generators, lines
    assert all("[0, 2]" in line for line in lines)


@pytest.mark.engine
def test_a_script_without_a_guard(checkpoint: Path, tmp_path: Path) -> None:
    """Spawned workers import it and would start over: one sentence each, no cascade."""
    script = tmp_path / "script.py"
    script.write_text(
        "import vllm_compat\n"
        "vllm_compat.apply()\n"
        "from speculators.data_generation.vllm_hidden_states_generator import (\n"
        "    VllmHiddenStatesGenerator,\n"
        ")\n"
        f"VllmHiddenStatesGenerator({str(checkpoint)!r}, layer_ids=[1], max_model_len=256)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "if __name__ == '__main__':" in line]
    assert len(said) == 2, done.stderr  # the worker, and the script
    assert done.stderr.count("Traceback") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm_compat.errors.UnsupportedEnvironmentError")
    assert str(script) in last


# -- a parent that CUDA makes unfit to fork -------------------------------------------------
#
# vLLM on a CPU always spawns, so this is shown at the level of the decision; torch's CUDA
# builds know without a GPU whether a process has asked for one.


def test_a_process_that_has_not_asked_for_cuda(zygote: Zygote) -> None:
    assert zygote.call("guest.test_starts:survives", []) == [True, True]


def test_a_process_that_has_asked_for_cuda(zygote: Zygote) -> None:
    """torch.cuda.is_available() in its default form is enough; nothing was initialised."""
    assert zygote.call("guest.test_starts:survives", ["is_available"]) == [True, False]


def test_a_process_that_has_initialised_cuda(zygote: Zygote) -> None:
    assert zygote.call("guest.test_starts:survives", ["initialised"]) == [True, False]


@pytest.mark.parametrize(
    ("chosen_before", "chosen_meanwhile", "expected"),
    [(None, None, None), ("fork", None, "fork"), (None, "spawn", "spawn")],
)
def test_the_start_method_stays_open(
    zygote: Zygote,
    chosen_before: str | None,
    chosen_meanwhile: str | None,
    expected: str | None,
) -> None:
    """Whoever uses multiprocessing settles its default; set_start_method() is refused then."""
    arguments = (chosen_before, chosen_meanwhile)
    assert zygote.call("guest.test_starts:settle", *arguments) == expected


def settle(chosen_before: str | None, chosen_meanwhile: str | None) -> str | None:
    """In the child: uses multiprocessing where vLLM does."""
    import multiprocessing

    from vllm_compat.worker_environment import process_settings_kept

    multiprocessing.set_start_method(chosen_before, force=True)
    with process_settings_kept():
        if chosen_meanwhile is not None:
            multiprocessing.set_start_method(chosen_meanwhile)
        multiprocessing.Lock()
    return multiprocessing.get_start_method(allow_none=True)


IMPORT = """
import os, sys, torch
import vllm_compat
from vllm_compat.worker_environment import cuda_survives_fork
# Without a GPU there is no NVML to ask; this stands for it.
torch.cuda._device_count_nvml = lambda: 0
if "apply" in sys.argv:
    vllm_compat.apply()
import speculators
name = "PYTORCH_NVML_BASED_CUDA_CHECK"
print(cuda_survives_fork(), name in os.environ, "vllm" in sys.modules)
"""


@pytest.mark.parametrize("applied", [True, False])
def test_importing_speculators_leaves_fork_usable(applied: bool) -> None:
    """If apply() came first; without it, the import alone makes it useless."""
    env = environment(PYTORCH_NVML_BASED_CUDA_CHECK=None)
    out = python(IMPORT, *["apply"] * applied, env=env).stdout
    assert out.splitlines()[-1] == f"{applied} False False"


def survives(steps: list[str]) -> list[bool]:
    """In the child: whether CUDA would survive a fork, before and after the steps."""
    import torch

    from vllm_compat.worker_environment import cuda_survives_fork

    found = [cuda_survives_fork()]
    for step in steps:
        if step == "is_available":
            torch.cuda.is_available()
        elif step == "initialised":
            torch.cuda._initialized = True  # what is_initialized() looks at
    return [*found, cuda_survives_fork()]


@pytest.mark.parametrize(
    ("set_by_the_user", "has_done", "expected"),
    [
        (None, "nothing", None),  # vLLM's own default, fork
        (None, "asked for CUDA", "spawn"),
        (None, "joined a group", "spawn"),
        ("fork", "nothing", "fork"),
        ("fork", "asked for CUDA", "spawn"),  # it would fail
        ("fork", "joined a group", "spawn"),  # workers would take it for theirs
        ("spawn", "nothing", "spawn"),
        ("spawn", "asked for CUDA", "spawn"),
    ],
)
def test_fork_where_it_works(
    zygote: Zygote, set_by_the_user: str | None, has_done: str, expected: str | None
) -> None:
    chosen = zygote.call("guest.test_starts:choose", set_by_the_user, has_done)
    assert chosen == expected


def choose(set_by_the_user: str | None, has_done: str) -> str | None:
    """In the child: the start method on a platform that isn't a CPU.

    The platform is the one thing that is made up here: there is no GPU.
    """
    import torch
    from torch import distributed
    from vllm import platforms

    from vllm_compat.worker_environment import starting_workers

    name = "VLLM_WORKER_MULTIPROC_METHOD"
    os.environ.pop(name, None)
    if set_by_the_user is not None:
        os.environ[name] = set_by_the_user
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    if has_done == "asked for CUDA":
        torch.cuda.is_available()
    elif has_done == "joined a group":
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

    class Gpu:
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

        @staticmethod
        def is_cpu() -> bool:
            return False

    platforms.__dict__["current_platform"] = Gpu()
    parallel = SimpleNamespace(tensor_parallel_size=1)
    with starting_workers(SimpleNamespace(parallel_config=parallel)):
        chosen = os.environ.get(name)
    assert os.environ.get(name) == set_by_the_user
    return chosen
