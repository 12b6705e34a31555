"""The config that is written after the last batch, on a machine without a device.

Its seam is in a module of its own, which may be imported before apply(), after it, or never.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_compat

CONFIG = "speculators.data_generation.config_generator"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"

pytestmark = pytest.mark.skipif(
    vllm_compat.status(workers=False)["device-name"].state == "not needed",
    reason="speculators 0.3.0 asks first; the matrix has cells with 0.4",
)


@pytest.fixture
def told(tmp_path: Path) -> Callable[[str], str]:
    """What a process prints last; of one that fails, its error."""

    def run(lines: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", lines],
            capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        )  # fmt: skip
        return (done.stderr if done.returncode else done.stdout).rstrip().splitlines()[-1]

    return run


ASK = f"import {CONFIG} as c\nprint(c._get_gpu_info())\n"
APPLY = "import vllm_compat\nvllm_compat.apply()\n"


def test_without_it_the_config_fails(told: Callable[[str], str]) -> None:
    import torch

    if torch.accelerator.is_available() or torch.accelerator.current_accelerator() is None:
        pytest.skip("this torch is not built for a device that is missing")
    assert "NVIDIA" in told(ASK)


@pytest.mark.parametrize(
    "before",
    ["", f"import {CONFIG}\n", f"import {GENERATOR}\n", f"import {GENERATOR}, {CONFIG}\n"],
    ids=["apply first", "config first", "generator first", "both first"],
)
def test_it_says_so(before: str, told: Callable[[str], str]) -> None:
    assert told(before + APPLY + ASK) == "CPU ONLY"


def test_it_is_taken_off_again(told: Callable[[str], str]) -> None:
    lines = f"import {CONFIG} as c\nold = c.get_device_name\n{APPLY}"
    lines += "assert c.get_device_name is not old\nvllm_compat.revert()\n"
    assert told(lines + "print(c.get_device_name is old)") == "True"


@pytest.mark.parametrize("again", [CONFIG, GENERATOR])
def test_it_outlives_a_reload(again: str, told: Callable[[str], str]) -> None:
    lines = f"import importlib, {CONFIG} as c, {GENERATOR} as g\n{APPLY}"
    lines += f"importlib.reload(importlib.import_module({again!r}))\n"
    lines += f"{ASK}assert c._get_gpu_info() == 'CPU ONLY'\n"
    lines += "vllm_compat.revert()\nprint(type(c.get_device_name), type(g.Request))\n"
    assert told(lines) == "<class 'function'> <class 'type'>"
