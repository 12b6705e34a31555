"""Real engines on machines that lack something: right rows, or an error that says what."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import Engine, run, with_small_shm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("conditions", "memory"),
    [
        ({}, "memfd"),
        ({"without": ["memfd_create"]}, "file without a name in /dev/shm"),
        (
            {"refused": ["memfd_create", "posix_fallocate"]},
            "file without a name in /dev/shm",
        ),
        ({"transport": "rpc"}, "vLLM's message queue"),
    ],
    ids=["memfd", "no-memfd", "refused", "rpc"],
)
def test_the_memory_that_is_there_is_used(
    engine: Engine, conditions: dict[str, Any], memory: str
) -> None:
    found = engine(**conditions)
    assert found.get("right"), found
    assert found["worker"]["memory"] == memory


@pytest.mark.parametrize(
    "conditions",
    [
        {"set_default_device": "meta", "dtype": "float64"},
        {"with_device": "meta", "dtype": "float16"},
        {"set_default_device": "meta", "dtype": "float64", "transport": "rpc"},
    ],
    ids=["set", "with", "rpc"],
)
def test_no_tensor_depends_on_a_default_of_the_user(
    engine: Engine, conditions: dict[str, Any]
) -> None:
    """A generator made and used under torch defaults that would break vLLM's own code."""
    found = engine(**conditions)
    assert found.get("right"), found
    assert found["devices"] == ["cpu"]
    assert found["defaults kept"]


def test_a_full_dev_shm_is_named(engine: Engine) -> None:
    """Docker's default is 64 MB; here less, to fill it sooner."""
    command = engine.command(transport="rpc", batches=12)
    found = engine.read(run(with_small_shm(command, "16m")))
    error = found.get("error", "no error")
    if "Insufficient space in /dev/shm" in error:
        return  # vLLM from 0.27 on says it itself
    assert error.startswith("EngineDeadError"), found
    assert "signal 7 (SIGBUS" in error
    assert "/dev/shm is full, where vLLM's message queues live" in error
    assert "--shm-size=1g, or --ipc=host" in error
    warned = (
        r"vLLM's replies, which carry the rows, take up to \d+ MB of /dev/shm \(1[0-6] of 16"
    )
    assert re.search(warned, found["log"]), "no warning at construction"


def test_a_small_dev_shm_is_enough_for_shared_memory(engine: Engine) -> None:
    """Without a memfd, too: then the rows go through a file elsewhere."""
    command = engine.command(without=["memfd_create"], batches=5)
    found = engine.read(run(with_small_shm(command, "16m")))
    if "Insufficient space in /dev/shm" in found.get("error", ""):
        pytest.skip("this vLLM starts on no /dev/shm of that size")
    assert found.get("right"), found
    assert found["worker"]["memory"].startswith("file without a name in /")
    assert "/dev/shm" not in found["worker"]["memory"]
