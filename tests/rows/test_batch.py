"""The account of a batch's rows, against a made-up worker that knows whose each row is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from vllm_compat.batch import Batch
from vllm_compat.errors import CaptureError
from vllm_compat.transport.messages import Kind, Message, Segment

from .simulated import DTYPE, WIDTH, Case, Sent, bytes_of, cases, find, truth

many = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def batch_of(case: Case) -> Batch:
    batch = Batch(case.prompts, case.layer_ids, WIDTH, DTYPE)
    for sequence in range(len(case.prompts)):
        batch.register(case.name(sequence))
    batch.start(case.first_step)
    return batch


def deliver(case: Case, sent: list[Sent]) -> list[list[torch.Tensor]]:
    batch = batch_of(case)
    feed(batch, sent)
    return all_of(batch)


def feed(batch: Batch, sent: list[Sent]) -> None:
    for message, payload in sent:
        batch.receive(message, payload)


def all_of(batch: Batch) -> list[list[torch.Tensor]]:
    return [batch.result(i) for i in range(len(batch.prompts))]


def assert_right(case: Case, results: list[list[torch.Tensor]]) -> None:
    storages = set()
    for sequence, states in enumerate(results):
        length = len(case.prompts[sequence])
        assert len(states) == len(case.layer_ids)
        for layer, state in zip(case.layer_ids, states, strict=True):
            assert state.dtype == DTYPE
            assert state.is_contiguous()
            assert state.tolist() == truth(sequence, layer, length).tolist()
            storages.add(state.untyped_storage().data_ptr())
    assert len(storages) == len(results) * len(case.layer_ids), "results share memory"


@given(cases(), st.booleans())
@many
def test_each_row_gets_to_its_place(case: Case, as_bytes: bool) -> None:
    event(f"restarts: {min(case.restarts, 2)}")
    event(f"steps: {min(len(case.steps), 4)}")
    batch = batch_of(case)
    sent = case.sent(bytes_of) if as_bytes else case.sent()
    for index, (message, payload) in enumerate(sent):
        if not batch.complete:
            assert not batch.wait(0), f"complete before message {index} of {len(sent)}"
        batch.receive(message, payload)
    assert batch.complete
    assert batch.wait(0)
    assert_right(case, all_of(batch))


@given(cases())
@many
def test_what_an_abandoned_batch_left_is_passed_over(case: Case) -> None:
    """Request ids can be the same: the generator counts a call only once it has begun."""
    older = replace(case, first_step=1, prompts=[[t + 1 for t in p] for p in case.prompts])
    current = replace(case, first_step=1 + len(older.steps))
    assert_right(current, deliver(current, older.sent() + current.sent()))


@given(cases(), st.data())
@many
def test_no_result_before_its_last_row(case: Case, data: st.DataObject) -> None:
    batch = batch_of(case)
    sent = case.sent()
    last = max(find(sent, Kind.ROWS))
    feed(batch, sent[: data.draw(st.integers(0, last))])
    assert not batch.complete
    assert not batch.wait(0)
    with pytest.raises(CaptureError, match=r"Sequence \d+, layer \d+: .* is missing"):
        all_of(batch)


# -- corruption -----------------------------------------------------------------------------


DAMAGE = ["drop", "double", "move", "row", "rows", "layer", "step", "kind"]


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Case, list[Sent], str]:
    """One message dropped, doubled, moved, or with one wrong number in it."""
    case = draw(cases())
    sent = case.sent(bytes_of if draw(st.booleans()) else torch.clone)
    at = draw(st.integers(0, len(sent) - 1))
    message, payload = sent[at]
    how = draw(st.sampled_from(DAMAGE))
    if how == "drop":
        del sent[at]
    elif how in ("double", "move"):
        to = draw(st.integers(0, len(sent) - 1))
        assume(how == "double" or to != at)
        if how == "move":
            del sent[at]
        sent.insert(to, (message, payload))
    else:
        was = getattr(message, how)
        wrong = draw(st.integers(0, 12) if how != "step" else st.integers(was - 2, was + 2))
        assume(wrong != was and wrong >= 0)
        sent[at] = (replace(message, **{how: wrong}), payload)
    return case, sent, f"{how} {message.kind}"


@given(damaged())
@settings(many, max_examples=500)
def test_right_or_an_error(trial: tuple[Case, list[Sent], str]) -> None:
    """Whatever happens to one message: the results are right, or there is an error."""
    case, sent, how = trial
    try:
        results = deliver(case, sent)
    except CaptureError:
        event(f"{how}: an error")
        return
    event(f"{how}: harmless")
    assert_right(case, results)


@given(cases(), st.data())
@many
def test_a_lost_block_is_named(case: Case, data: st.DataObject) -> None:
    sent = case.sent()
    at = data.draw(st.sampled_from(find(sent, Kind.ROWS)))
    message = sent.pop(at)[0]
    sequence, position = case.steps[message.step - case.first_step][message.row]
    # Within the step, at the latest at its end: not after the timeout of a batch.
    with pytest.raises(
        CaptureError, match=rf"Sequence {sequence}, layer {message.layer}: .*\b{position}\b"
    ):
        feed(batch_of(case), sent)


@given(cases(), st.data())
@many
def test_a_doubled_block_is_named(case: Case, data: st.DataObject) -> None:
    sent = case.sent()
    at = data.draw(st.sampled_from(find(sent, Kind.ROWS)))
    message = sent[at][0]
    sequence, position = case.steps[message.step - case.first_step][message.row]
    sent.insert(at, sent[at])
    with pytest.raises(
        CaptureError,
        match=rf"Sequence {sequence}, layer {message.layer}: position {position} came where",
    ):
        deliver(case, sent)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@given(case=cases(), data=st.data())
@settings(many, max_examples=60)
def test_a_row_that_is_not_finite_is_named(bad: float, case: Case, data: st.DataObject) -> None:
    sent = case.sent()
    message, norms = sent[data.draw(st.sampled_from(find(sent, Kind.NORMS)))]
    row = data.draw(st.integers(0, message.rows - 1))
    norms[row] = bad
    sequence, position = case.steps[message.step - case.first_step][message.row + row]
    with pytest.raises(
        CaptureError,
        match=rf"Sequence {sequence}, layer {message.layer}, position {position}: .*not finite",
    ):
        deliver(case, sent)


@pytest.mark.parametrize("kind", [Kind.POSITIONS, Kind.TOKENS])
@given(case=cases(), data=st.data(), off=st.sampled_from([-1, 1, 16]))
@settings(many, max_examples=60)
def test_another_position_or_token_is_named(
    kind: int, case: Case, data: st.DataObject, off: int
) -> None:
    sent = case.sent()
    message, numbers = sent[data.draw(st.sampled_from(find(sent, kind)))]
    row = data.draw(st.integers(0, message.rows - 1))
    right = int(numbers[row])
    numbers[row] = right + off
    sequence, position = case.steps[message.step - case.first_step][row]
    what = "position" if kind == Kind.POSITIONS else "token"
    with pytest.raises(
        CaptureError,
        match=(
            rf"Sequence {sequence}, position {position}: the model was given {what} "
            rf"{right + off} for this row, not {right}"
        ),
    ):
        deliver(case, sent)


@given(cases(), st.data())
@many
def test_two_sequences_that_changed_places(case: Case, data: st.DataObject) -> None:
    """Positions agree if both are as long: only the token ids tell them apart."""
    length = data.draw(st.integers(1, 10))
    case.prompts += [list(range(length)), list(range(100, 100 + length))]
    a, b = len(case.prompts) - 2, len(case.prompts) - 1
    rows = [(a, p) for p in range(length)] + [(b, p) for p in range(length)]
    case.steps.append(rows)
    sent = case.sent()
    swapped = [Segment(case.name(b), 0, length), Segment(case.name(a), 0, length)]
    last = case.first_step + len(case.steps) - 1
    sent[find(sent, Kind.STEP)[-1]] = (Message.of_segments(last, swapped), None)
    with pytest.raises(CaptureError, match=f"Sequence {b}, position 0: .* given token 0 "):
        deliver(case, sent)


A, B = "req_7_0", "req_7_1"
SEGMENTS: list[Any] = [
    ("foreign", [(A, 0, 4), ("req_6_1", 0, 3)], r"req_6_1.*isn't in this batch"),
    ("late", [(A, 0, 4), (B, 1, 2)], r"Sequence 1, layer 3.*position 0 was next"),
    ("long", [(A, 0, 5), (B, 0, 3)], r"Sequence 0: .* 0 to 4 of a prompt of 4"),
    ("negative", [(A, -1, 4)], r"Sequence 0: .* -1 to 2 of a prompt of 4"),
    ("none", [(A, 0, 0)], r"Sequence 0: .* of a prompt of 4"),
    ("twice", [(B, 0, 3), (B, 0, 3)], r"Sequence 1, layer 3: position 0 came"),
]


@pytest.mark.parametrize(
    ("segments", "message"), [pytest.param(*s[1:], id=s[0]) for s in SEGMENTS]
)
def test_segments_that_cannot_be(segments: list[tuple[str, int, int]], message: str) -> None:
    rows = [(0, p) for p in range(4)] + [(1, p) for p in range(3)]
    case = Case([[1, 2, 3, 4], [5, 6, 7]], [3], [rows])
    sent = case.sent()
    parts = [Segment(*s) for s in segments]
    count = sum(s.count for s in parts)
    # Rows as the segments say, without positions and tokens, which would notice first.
    kept = [(Message.of_segments(1, parts), None)]
    kept += [
        (replace(m, rows=count), p[:1].expand(count, *p.shape[1:]).clone())
        for m, p in sent
        if m.kind in (Kind.NORMS, Kind.ROWS)
    ]
    with pytest.raises(CaptureError, match=message):
        deliver(case, kept)


def test_a_complete_sequence_is_not_computed_again() -> None:
    case = Case([[1, 2], [3, 4]], [0], [[(0, 0), (0, 1)], [(0, 0), (0, 1)], [(1, 0), (1, 1)]])
    with pytest.raises(CaptureError, match=r"Sequence 0, layer 0: .*the sequence was complete"):
        deliver(case, case.sent())


PAYLOADS: list[Any] = [
    pytest.param(lambda t: t.float(), id="another-dtype"),
    pytest.param(lambda t: t[:-1], id="a-row-short"),
    pytest.param(lambda t: torch.cat([t, t[:1]]), id="a-row-long"),
    pytest.param(lambda t: t[:, :-1].contiguous(), id="a-column-short"),
    pytest.param(lambda t: bytes_of(t)[:-1], id="a-byte-short"),
    pytest.param(lambda t: bytes_of(t)[:0], id="no-bytes"),
    pytest.param(lambda t: None, id="nothing"),
]


@pytest.mark.parametrize("change", PAYLOADS)
def test_a_block_of_another_kind_is_named(change: Any) -> None:
    case = Case([[1], [2, 3, 4]], [6], [[(0, 0), (1, 0), (1, 1), (1, 2)]], pieces={(0, 6): [2]})
    sent = case.sent()
    at = find(sent, Kind.ROWS)[1]
    sent[at] = (sent[at][0], change(sent[at][1]))
    with pytest.raises(CaptureError, match=r"Sequence 1, layer 6, position 1: a block of "):
        deliver(case, sent)


@pytest.mark.parametrize("kind", [Kind.NORMS, Kind.POSITIONS, Kind.TOKENS])
@pytest.mark.parametrize(
    "change",
    [lambda t: t[:-1], lambda t: t.to(torch.int32), lambda t: None],
    ids=["short", "int32", "nothing"],
)
def test_numbers_of_another_kind_are_refused(kind: int, change: Any) -> None:
    case = Case([[1], [2, 3, 4]], [6], [[(0, 0), (1, 0), (1, 1), (1, 2)]])
    sent = case.sent()
    at = find(sent, kind)[0]
    sent[at] = (sent[at][0], change(sent[at][1]))
    with pytest.raises(CaptureError, match=r"Sequence 0(, layer 6)?, position 0: a block of "):
        deliver(case, sent)


def test_a_step_that_cannot_be_read() -> None:
    batch = batch_of(Case([[1]], [0], []))
    for text in ("{", "[1]", "[[1, 2]]", '[["req_7_0", "x", 1]]'):
        with pytest.raises(CaptureError, match=r"can't be read"):
            batch.receive(Message(Kind.STEP, 1, text=text), None)
        batch.start(1)


def test_a_failure_of_the_worker_is_passed_on() -> None:
    batch = batch_of(Case([[1]], [0], []))
    with pytest.raises(CaptureError, match="out of memory"):
        batch.receive(Message(Kind.FAILED, 1, text="out of memory"), None)


def test_more_requests_than_sequences() -> None:
    batch = batch_of(Case([[1]], [0], []))
    with pytest.raises(CaptureError, match="req_9"):
        batch.register("req_9")


def test_an_error_reaches_whoever_waits() -> None:
    batch = batch_of(Case([[1]], [0], []))
    batch.fail(CaptureError("first"))
    batch.fail(CaptureError("second"))
    with pytest.raises(CaptureError, match="first"):
        batch.wait()
