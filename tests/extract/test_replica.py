"""How a replica finds the sample that a batch fails of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_compat import CaptureError, EngineDeadError
from vllm_compat.extract import Job, ReplicaError
from vllm_compat.extract.replica import Failure, Replica


class Flawed:
    """A generator that fails whenever one sample is in the batch: what a real engine does on
    a state that isn't finite, or on a prompt that the KV cache has no room for. It stands in
    for one because neither can be had from a healthy tiny model."""

    layer_ids = (0,)
    calls: list[list[int]]

    def __init__(self, error: Callable[[int], Exception]) -> None:
        self.calls, self._error = [], error

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        self.calls.append([p[0] for p in prompts])
        for place, prompt in enumerate(prompts):
            if prompt[0] == 13:
                raise self._error(place)
        return [{"input_ids": torch.tensor(p), "hidden_states": []} for p in prompts]


def flawed_replica(generator: Flawed) -> Replica:
    replica = Replica(Job("none"))
    replica._vocabulary, replica._max_tokens = 100, 10
    replica.start = lambda: setattr(replica, "_generator", generator)  # type: ignore[method-assign]
    return replica


def test_a_batch_that_fails_is_computed_one_by_one() -> None:
    generator = Flawed(
        lambda place: CaptureError(f"Sequence {place}: the state is not finite.")
    )
    results = flawed_replica(generator).states([[11], [13], [17]])
    assert generator.calls == [[11, 13, 17], [11], [13], [17]]
    assert isinstance(results[1], Failure)
    assert results[1].reason == "The sample: the state is not finite."
    assert [r["input_ids"].item() for r in (results[0], results[2])] == [11, 17]


def test_a_sample_that_kills_the_engine_is_found() -> None:
    generator = Flawed(lambda place: EngineDeadError("worker ended with signal 9"))
    results = flawed_replica(generator).states([[13], [17]])
    assert generator.calls == [[13, 17], [13, 17], [13], [13], [17]]
    assert isinstance(results[0], Failure)
    assert results[0].reason == "the engine died of it: worker ended with signal 9"
    assert results[1]["input_ids"].item() == 17


def test_an_engine_that_keeps_dying_stops_the_run() -> None:
    generator = Flawed(lambda place: EngineDeadError("no device"))
    with pytest.raises(ReplicaError, match="keeps failing: no device"):
        flawed_replica(generator).states([[13], [13], [13]])
