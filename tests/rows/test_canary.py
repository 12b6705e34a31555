"""The canary: a sequence that is computed again, alone, has to come out the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.hybrid import soil
from conformance.models import prompt

import vllm_compat
from vllm_compat.canary import Canary
from vllm_compat.settings import Settings

from .conftest import Subject

BATCH = [prompt(9 + i, i) for i in range(6)]


@pytest.fixture
def watched(shared: Subject) -> Iterator[Subject]:
    """Every batch is looked at."""
    with canary_of(shared, 1.0):
        yield shared


def canary_of(subject: Subject, share: float, recurrent: bool = False) -> Any:
    session = subject.generator.executor._session
    return mock.patch.object(session, "_canary", Canary(share, recurrent))


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_it_finds_states_of_others(hybrid: Subject) -> None:
    """Recurrent states that nobody cleans: wrong rows, with an account that is in order."""

    def leave_dirty(worker: Any) -> None:
        worker.worker._vllm_compat.blocks.begin = lambda *_: None

    def clean_again(worker: Any) -> None:
        del worker.worker._vllm_compat.blocks.begin

    ones = [prompt(1, i) for i in range(8)]
    hybrid.in_worker(leave_dirty)
    try:
        hybrid.in_worker(soil, 3.0)
        with canary_of(hybrid, 0.0):
            off = [
                error.item()
                for result, ids in zip(hybrid.generator.generate(ones), ones, strict=True)
                for state, right in zip(
                    result["hidden_states"], hybrid.reference(ids), strict=True
                )
                for error in (state.float() - right).norm(dim=-1) / right.norm(dim=-1)
            ]
        assert min(off) > 0.2, "they are right: this test shows nothing"
        hybrid.in_worker(soil, 3.0)
        with (
            canary_of(hybrid, 0.01, recurrent=True),
            pytest.raises(vllm_compat.CaptureError, match=r"Sequence 0 \(1 tokens\).*off by"),
        ):
            hybrid.generator.generate(ones)
    finally:
        hybrid.in_worker(clean_again)
    with canary_of(hybrid, 0.01, recurrent=True):
        hybrid.check(ones)


def changes_with(rows: int, factor: float, only: slice = slice(None)) -> Any:
    """A layer that computes something else when a step has more rows than that."""

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        hidden, residual = output
        if len(hidden) > rows:
            hidden[only] += factor * residual[only].flip(-1)
        return hidden, residual

    return hook


@pytest.mark.engine
def test_it_finds_what_depends_on_the_batch(watched: Subject) -> None:
    with (
        watched.hooked(changes_with(30, 0.5)),
        pytest.raises(vllm_compat.CaptureError, match="and so are those of 5 of 5 other"),
    ):
        watched.generator.generate(BATCH)
    watched.check(BATCH)
    assert not watched.engine.scheduler.requests


@pytest.mark.engine
def test_single_rows_are_no_alarm(watched: Subject) -> None:
    """Experts with nearly equal scores are swapped by the noise of another batch."""
    with watched.hooked(changes_with(30, 0.5, slice(None, None, 3))):
        assert len(watched.generator.generate(BATCH)) == len(BATCH)


@pytest.mark.engine
def test_one_sequence_is_a_warning(watched: Subject, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "vllm_compat"),
        watched.hooked(changes_with(30, 0.5, slice(9))),
    ):
        assert len(watched.generator.generate(BATCH)) == len(BATCH)
    assert "Sequence 0 (9 tokens): computed again alone, its states are off" in caplog.text
    assert "0 of 5 other sequences" in caplog.text


@pytest.mark.engine
def test_the_user_sees_nothing_of_it(shared: Subject) -> None:
    """As many results, the same ones, and as many steps more as it looked at sequences."""
    with canary_of(shared, 0.0):
        step = shared.engine._step
        without = shared.generator.generate(BATCH)
        steps = shared.engine._step - step
    with canary_of(shared, 1.0):
        results = shared.check(BATCH)
        assert shared.engine._step - step == 2 * steps + 1
    for a, b in zip(without, results, strict=True):
        assert a["input_ids"].tolist() == b["input_ids"].tolist()
        for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True):
            assert torch.equal(x, y)


@pytest.mark.engine
def test_an_error_in_it_is_one_of_the_call(watched: Subject) -> None:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        if len(output[0]) == len(BATCH[0]):
            raise RuntimeError("alone")

    with (
        watched.hooked(hook),
        pytest.raises(vllm_compat.CaptureError, match="RuntimeError: alone"),
    ):
        watched.generator.generate(BATCH)
    watched.check(BATCH)


# -- how often: no engine, its times are given -------------------------------------------------


def looks(canary: Canary, batches: int, seconds: float, cost: float) -> list[int]:
    """The batches that it looked at, if one sequence takes ``cost`` seconds."""
    clock, found, seen = 0.0, [], []
    states = [[torch.ones(1, 4)]]

    def compute(_: list[int]) -> Any:
        nonlocal clock
        clock += cost
        found.append(True)
        return states[0]

    with mock.patch("time.monotonic", side_effect=lambda: clock):
        for batch in range(1, batches + 1):
            found.clear()
            canary.look([[1]], states, seconds, compute)
            seen += [batch] * len(found)
    return seen


def test_it_takes_its_share_of_the_time() -> None:
    seen = looks(Canary(0.01, recurrent=False), 10_000, seconds=1.0, cost=0.1)
    assert seen[0] == 100  # before anything was measured it may take as long as a batch
    assert 900 < len(seen) <= 1000


def test_the_first_batches_of_a_recurrent_model() -> None:
    seen = looks(Canary(0.01, recurrent=True), 1000, seconds=1.0, cost=1.0)
    assert seen[:3] == [1, 2, 3]
    assert len(seen) <= 1000 * 0.01 + 3


def test_it_is_switched_off() -> None:
    assert looks(Canary(0.0, recurrent=True), 1000, seconds=1.0, cost=0.0) == []


@pytest.mark.parametrize(("text", "share"), [("0", 0.0), ("0.5", 0.5), ("1", 1.0), ("", 0.01)])
def test_the_share(text: str, share: float) -> None:
    with mock.patch.dict(os.environ, {"VLLM_COMPAT_CANARY": text}):
        assert Settings.read().canary == share


@pytest.mark.parametrize("text", ["off", "-1", "2", "nan"])
def test_no_share(text: str) -> None:
    with (
        mock.patch.dict(os.environ, {"VLLM_COMPAT_CANARY": text}),
        pytest.raises(vllm_compat.InvalidInputError, match="VLLM_COMPAT_CANARY"),
    ):
        Settings.read()
