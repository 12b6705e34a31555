"""Checkpoints for the scripts and commands that these tests run as users would."""

from __future__ import annotations

from pathlib import Path

import pytest
from guest.conftest import checkpoint, zygote

__all__ = ["checkpoint", "zygote"]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a chat template."""
    from conformance.models import write_chat_checkpoint

    return write_chat_checkpoint(tmp_path_factory.mktemp("models") / "tiny-llama")
