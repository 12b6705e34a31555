"""Rows are copied whole, and on few cores without threads that spin on them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from vllm_compat.arena import Copier

# torch cuts a copy of more than 32,768 values in parts, one for each of its threads, which it
# then keeps, spinning. They are a process's own: hence one that has none yet.
ONE_THREAD = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from vllm_compat.arena import Copier

torch.set_num_threads(2)
target, source = (torch.empty(1000, 576, dtype=torch.bfloat16) for _ in range(2))
before = set(os.listdir("/proc/self/task"))
Copier()([(target, source)])
print("THREADS", len(set(os.listdir("/proc/self/task")) - before))
"""


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_copied(width: int, dtype: torch.dtype) -> None:
    copier = Copier()
    copier._width = width
    whole = torch.randn(700, 1000).to(dtype)
    sources = [whole[:1], whole[1:400], whole[400:]]
    targets = [torch.zeros_like(source) for source in sources]
    copier(list(zip(targets, sources, strict=True)))
    copier.close()
    assert torch.equal(torch.cat(targets), whole)


def test_no_thread_is_started_on_two_cores() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_THREAD], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["THREADS 0"], done.stdout + done.stderr
