"""What holds for every test: it leaves nothing behind, and shares the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cores import take_share

from vllm_compat import activation


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist gives this to its workers alone (its how-to, "Identifying workers").
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        take_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """What one test leaves behind changes what the tests after it start."""
    before = _state()
    yield
    now = _state()
    assert now == before, {
        name: (before.get(name), now.get(name))
        for name in {*before, *now}
        if before.get(name) != now.get(name)
    }


def _state() -> dict[str, object]:
    """Who has called apply(), and the variables that vLLM and transformers read."""
    state: dict[str, object] = {"apply()": list(activation._STATE.holders.values())}
    state |= {n: v for n, v in os.environ.items() if n.startswith(("VLLM_", "TRANSFORMERS_"))}
    return state
