"""vLLM gives the same tokens and log probabilities, to the last bit, with and without us."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .processes import environment

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "guest.same_vllm", str(checkpoint)],
        env=environment(), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (line,) = (part for part in done.stdout.splitlines() if part.startswith("ANSWERS "))
    return json.loads(line.removeprefix("ANSWERS "))


def test_the_engine_has_something_to_get_wrong(answers: Any) -> None:
    """Tokens were cached and not cached, prompts were cut, answers differ."""
    first, second = answers["llm"]["without"]["together"]
    assert [told[3] for told in second] > [told[3] for told in first]
    assert [told[0] for told in first] == [told[0] for told in second]
    assert len({tuple(told[0]) for told in first}) > 3


def test_llm(answers: Any) -> None:
    phases = answers["llm"]
    assert len(phases) == 7
    for phase, told in phases.items():
        assert told == phases["without"], phase


def test_async_scheduling(answers: Any) -> None:
    """Real but for CUDA's streams: see guest.same_vllm."""
    scheduled = answers["async scheduling"]
    assert scheduled["scheduler"] == "AsyncScheduler"
    assert scheduled["batches"] == 2  # the next step is scheduled while one runs
    phases = scheduled["answers"]
    assert len(phases) == 5
    for phase, told in phases.items():
        assert told == phases["without"], phase
    # Greedy, so its tokens are those of the other scheduler; steps are put together otherwise.
    expected = answers["llm"]["without"]["alone"]
    assert [t[0] for t in phases["without"]["alone"]] == [t[0] for t in expected]


def test_async_llm(answers: Any) -> None:
    """Made with apply() on; its answers are those of LLM, which was made without."""
    expected = answers["llm"]["without"]["alone"]
    assert len(answers["async"]) == 3
    for phase, told in answers["async"].items():
        assert told == expected, phase
