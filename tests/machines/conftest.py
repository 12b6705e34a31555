"""Conditions that this machine doesn't have by itself, made in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.models import FAMILIES, Reference, prompt, write_checkpoint
from guest.processes import environment

LENGTHS = (1, 40, 300, 2100)
"""Tokens of the prompts; a layer's states of the longest take more than 1 MB."""


def run(
    command: list[str], timeout: float = 580, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def with_small_shm(command: list[str], size: str) -> list[str]:
    """The command, in a mount namespace where /dev/shm is as small as a container's."""
    unshare = ["unshare", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "none", "/dev/shm"],
            capture_output=True,
            check=False,
        ).returncode
    ):
        pytest.skip("this user may not mount anything in a namespace of its own")
    script = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    return [*unshare, "sh", "-c", script, "sh", *command]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and what transformers computes for the prompts, in ``right.pt``."""
    folder = tmp_path_factory.mktemp("machines")
    family = FAMILIES[0]
    reference = Reference(write_checkpoint(family, folder), family.layer_ids)
    prompts = [prompt(length, seed=7) for length in LENGTHS]
    torch.save(
        {
            "prompts": prompts,
            "layer_ids": list(family.layer_ids),
            "states": [reference(ids) for ids in prompts],
        },
        folder / "right.pt",
    )
    return folder


class Engine:
    """Starts ``machines.generate`` and reads what it found."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint

    def command(self, **conditions: Any) -> list[str]:
        return [
            sys.executable, "-m", "machines.generate", str(self._checkpoint),
            json.dumps(conditions),
        ]  # fmt: skip

    def __call__(self, **conditions: Any) -> dict[str, Any]:
        return self.read(run(self.command(**conditions)))

    @staticmethod
    def read(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert found, f"it ended with {done.returncode}: {done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(found[-1].removeprefix("FOUND "))
        result["log"] = done.stdout + done.stderr
        return result


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Engine:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return Engine(checkpoint)
