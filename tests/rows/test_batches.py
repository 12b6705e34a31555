"""Whole batches on a real engine whose every limit is small: each row belongs to its token."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conformance.models import VOCABULARY, prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import BUDGET, MAX_LEN, ROW_TOLERANCE, SEQUENCES, Build, Subject, error_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture
def subject(shared: Subject) -> Subject:
    return shared


@pytest.fixture(autouse=True)
def nothing_is_left(subject: Subject) -> Iterator[None]:
    yield
    assert not subject.engine.scheduler.requests


def test_the_limits_are_small(subject: Subject) -> None:
    """The premise of this module: prompts come in chunks, and sequences wait for others."""
    config = subject.generator.vllm_config.scheduler_config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (BUDGET, SEQUENCES)
    before = subject.engine._step
    subject.check([prompt(200, 1)])
    assert subject.engine._step - before == 4


lengths = st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 63, 64, 65, 128, 129]))


@st.composite
def batches(draw: st.DrawFn) -> list[list[int]]:
    """Prompts of which some are the same, and some begin alike."""
    known: list[list[int]] = []
    for _ in range(draw(st.integers(1, 20))):
        new = prompt(draw(lengths), draw(st.integers(0, 10**6)))
        what = draw(st.sampled_from(["new", "same", "prefix"])) if known else "new"
        old = draw(st.sampled_from(known)) if known else []
        known.append(
            {"new": new, "same": old, "prefix": old[: len(old) // 16 * 16] + new}[what]
        )
    return known


@given(batch=batches())
@settings(
    max_examples=25,
    deadline=None,
    # One engine for all examples: each so also finds what an earlier one has left behind.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_batch(subject: Subject, batch: list[list[int]]) -> None:
    subject.check([p[:MAX_LEN] for p in batch])


def test_as_when_alone(subject: Subject) -> None:
    """Against the generator itself, not only against transformers."""
    batch = [prompt(5 + 23 * i, 30 + i) for i in range(14)]
    together = subject.generator.generate(batch)
    for ids, result in zip(batch, together, strict=True):
        (alone,) = subject.generator.generate([ids])
        for a, b in zip(result["hidden_states"], alone["hidden_states"], strict=True):
            assert error_of(a, b.float()).max() < ROW_TOLERANCE


def test_several_hundred_sequences(subject: Subject) -> None:
    subject.check([prompt(1 + (i * 7) % 30, 1000 + i) for i in range(300)])


def test_the_same_prompt_many_times(subject: Subject) -> None:
    results = subject.check([prompt(40, 3)] * 50)
    first = results[0]["hidden_states"]
    for result in results[1:]:
        for a, b in zip(first, result["hidden_states"], strict=True):
            assert error_of(a, b.float()).max() < ROW_TOLERANCE


def test_prompts_longer_than_a_step(subject: Subject) -> None:
    subject.check([prompt(n, 50 + n) for n in (300, 1, 511, 65, 64, 510)])


def test_lengths_at_block_edges(subject: Subject) -> None:
    edges = [16 * k + around for k in range(1, 17) for around in (-1, 0, 1)]
    subject.check([prompt(n, 200 + n) for n in edges])


def test_common_prefixes(subject: Subject) -> None:
    """Cached blocks would not be computed, and what isn't computed can't be captured."""
    shared = prompt(64, 5)
    batch = [shared + prompt(n, 60 + n) for n in (1, 16, 17, 40)] + [shared, shared[:32]]
    subject.check(batch)
    subject.check(list(reversed(batch)))


def test_too_long_is_cut(subject: Subject) -> None:
    long = prompt(2000, 9)
    subject.check(
        [prompt(3, 8), long, long[: MAX_LEN - 1]], [prompt(3, 8)] + [long[: MAX_LEN - 1]] * 2
    )


ROWS = [prompt(24, 13), prompt(24, 14), prompt(24, 15)]
FORMS: dict[str, Any] = {
    "lists": ROWS,
    "tuple": tuple(map(tuple, ROWS)),
    "2-D tensor": torch.tensor(ROWS),
    "2-D int32 tensor": torch.tensor(ROWS, dtype=torch.int32),
    "transposed tensor": torch.tensor(ROWS).T.contiguous().T,
    "2-D array": numpy.array(ROWS),
    "list of tensors": [torch.tensor(r) for r in ROWS],
    "list of arrays": [numpy.array(r, dtype=numpy.uint16) for r in ROWS],
    "mixed": [ROWS[0], torch.tensor(ROWS[1]), numpy.array(ROWS[2])],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(subject: Subject, form: str) -> None:
    subject.check(FORMS[form], ROWS)


def test_results_are_the_callers_own(subject: Subject) -> None:
    """Nothing that the caller does to a result shows in another one, then or later."""
    batch = [prompt(30, 70), prompt(30, 71)]
    kept = subject.check(batch)
    copies = [[s.clone() for s in r["hidden_states"]] for r in kept]
    (other,) = subject.generator.generate([batch[0]])
    for state in other["hidden_states"]:
        state.fill_(float("nan"))
    del other
    # Layer 2 was asked for twice: two tensors.
    kept[0]["hidden_states"][0].zero_()
    assert torch.equal(kept[0]["hidden_states"][3], copies[0][3])
    for seed in range(5):
        subject.check([prompt(300, seed), prompt(30, seed)])
    for result, copy in zip(kept[1:], copies[1:], strict=True):
        assert all(map(torch.equal, result["hidden_states"], copy))


def test_large_results_are_the_callers_own(subject: Subject) -> None:
    """The same where results come from memory that is used again (over 1 MiB)."""
    import vllm_compat.arena as arena

    small, arena._SMALL = arena._SMALL, 1
    try:
        kept = subject.check([prompt(200, 80), prompt(31, 81)])
        copies = [[s.clone() for s in r["hidden_states"]] for r in kept]
        views = [s[5:6] for s in kept[0]["hidden_states"]]
        for seed in range(4):
            subject.check([prompt(200, 90 + seed), prompt(31, seed)])
        assert all(torch.equal(v, c[5:6]) for v, c in zip(views, copies[0], strict=True))
        del kept[0]  # the views keep its memory
        for seed in range(4):
            subject.check([prompt(200, 95 + seed), prompt(31, seed)])
        assert all(torch.equal(v, c[5:6]) for v, c in zip(views, copies[0], strict=True))
        assert all(map(torch.equal, kept[0]["hidden_states"], copies[1]))
    finally:
        arena._SMALL = small


def resident(pid: int | str) -> int:
    """Memory of a process in KiB, without what it shares with others' files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def test_hundreds_of_calls(subject: Subject) -> None:
    """No descriptor, thread, request or memory more than after the first ones."""

    def held() -> dict[str, int]:
        pid = subject.worker.pid
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "worker's descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": threading.active_count(),
            "worker's threads": len(os.listdir(f"/proc/{pid}/task")),
        }

    def requests() -> int:
        """In the worker: vLLM tells it of a finished request with the step after."""
        return int(subject.in_worker(lambda w: len(w.model_runner.requests)))

    source = random.Random(4)
    batches = [
        [prompt(source.randint(1, 50), source.randrange(10**6)) for _ in range(3)]
        for _ in range(50)
    ]
    # The same ones again and again: oneDNN keeps a kernel for each shape that it has met.
    for batch in batches:
        subject.generator.generate(batch)
    before = held()
    processes = ["self", subject.worker.pid]
    memory = [resident(p) for p in processes]
    for batch in batches * 5:
        subject.generator.generate(batch)
    assert held() == before
    assert requests() <= 3
    grown = [resident(p) - then for p, then in zip(processes, memory, strict=True)]
    assert max(grown) < 20_000, f"{grown} KiB in 250 calls"
    subject.check(batches[0])


def test_rows_travel_with_replies_too(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the worker can't reach this process's memory."""
    monkeypatch.setenv("VLLM_COMPAT_TRANSPORT", "rpc")
    subject = build()
    assert subject.engine.description["transport"] == "none"
    assert subject.engine._reader is None
    subject.check([prompt(1 + 13 * i, i) for i in range(25)])
    subject.check([prompt(400, 1), prompt(1, 2)])
    subject.close()


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([], id="no-sequence"),
        pytest.param([[1, 2], []], id="empty-sequence"),
        pytest.param([[1, 2, VOCABULARY], [4]], id="outside-the-vocabulary"),
        pytest.param([[3, -1]], id="negative"),
        pytest.param([[1.5]], id="float"),
        pytest.param([["a"]], id="text"),
        pytest.param(torch.tensor([1, 2]), id="1-D"),
        pytest.param(None, id="none"),
    ],
)
def test_bad_input_then_good(subject: Subject, bad: Any) -> None:
    step = subject.engine._step
    with pytest.raises(ValueError, match=r"\w{3}"):
        subject.generator.generate(bad)
    assert subject.engine._step == step
    assert not subject.engine.scheduler.requests
    subject.check([prompt(20, 1), prompt(3, 2)])
