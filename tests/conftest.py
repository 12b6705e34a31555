"""What holds for every test: it leaves the variables as they were, and shares the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cores import take_share


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist gives this to its workers alone (its how-to, "Identifying workers").
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        take_share(int(worker["workerid"].removeprefix("gw")), worker["workercount"])


@pytest.fixture(autouse=True)
def _variables_stay() -> Iterator[None]:
    """A variable that one test leaves behind changes what the tests after it start."""
    before = _variables()
    yield
    now = _variables()
    assert now == before, {
        name: (before.get(name), now.get(name))
        for name in {*before, *now}
        if before.get(name) != now.get(name)
    }


def _variables() -> dict[str, str]:
    return {n: v for n, v in os.environ.items() if n.startswith(("VLLM_", "TRANSFORMERS_"))}
