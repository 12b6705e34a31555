"""A checkpoint, and a way to run the generator on it in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from conformance.models import FAMILIES, write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(FAMILIES[0], folder)
    return folder


@pytest.fixture
def one_prompt(tmp_path: Path) -> Run:
    """Runs one_prompt.py; from a folder where the checkout's package isn't in the way."""

    def run(
        checkpoint: Path, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        script = Path(__file__).with_name("one_prompt.py")
        return subprocess.run(
            [sys.executable, str(script), str(checkpoint), *arguments],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            check=False,
        )

    return run
