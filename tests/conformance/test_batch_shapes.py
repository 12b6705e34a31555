"""Every row of states belongs to its token: one set of cases for every pair of versions.

Only the public surface is used: `vllm_compat.apply()`, speculators' generator, and its
results. Each case compares all rows of all asked layers with transformers in float32. The
cases of one family share one generator and run in this order, so that each also finds what an
earlier one has left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from .conftest import Subject
from .models import VOCABULARY, check_states, prompt

pytestmark = pytest.mark.engine


def check(subject: Subject, batch: Any, expected: Sequence[Sequence[int]]) -> None:
    results = subject.generator.generate(batch)
    assert len(results) == len(expected)
    storages = set()
    for place, (result, ids) in enumerate(zip(results, expected, strict=True)):
        assert set(result) == {"input_ids", "hidden_states", "loss_mask"}
        assert result["loss_mask"] is None
        assert result["input_ids"].dtype == torch.long
        assert result["input_ids"].tolist() == list(ids), (
            f"result {place} is that of another input"
        )
        states = result["hidden_states"]
        where = f"result {place} ({len(ids)} tokens)"
        check_states(states, subject.reference(ids), subject.family.layer_ids, where)
        storages.update(state.untyped_storage().data_ptr() for state in states)
    assert len(storages) == len(expected) * len(subject.family.layer_ids), (
        "results share memory"
    )


def same(subject: Subject, batch: list[list[int]]) -> None:
    check(subject, batch, batch)


TWO = [prompt(50, 1), prompt(3, 2)]


def test_two_sequences(subject: Subject) -> None:
    same(subject, TWO)


def test_same_call_again(subject: Subject) -> None:
    same(subject, TWO)


SHARED = [prompt(48, 3) + prompt(30, seed) for seed in (4, 5, 6)]


def test_shared_prefix(subject: Subject) -> None:
    same(subject, SHARED)


def test_shared_prefix_again(subject: Subject) -> None:
    same(subject, SHARED)


DUPLICATES = [prompt(64, 7), prompt(20, 8), prompt(64, 7), prompt(64, 7), prompt(20, 8)]


def test_duplicates(subject: Subject) -> None:
    same(subject, DUPLICATES)


def test_duplicates_again(subject: Subject) -> None:
    same(subject, DUPLICATES)


def test_twelve_sequences(subject: Subject) -> None:
    # From 11 on, "req_0_10" sorts before "req_0_2".
    same(subject, [prompt(10 + 7 * i, 20 + i) for i in range(12)])


def test_forty_sequences(subject: Subject) -> None:
    # More than the generator lets run at once (32).
    same(subject, [prompt(5 + (i * 13) % 40, 40 + i) for i in range(40)])


def test_two_after_forty(subject: Subject) -> None:
    same(subject, TWO)


def test_over_the_token_budget(subject: Subject) -> None:
    # 10,000 tokens; a step takes 8,192 (or what the family asks for where the generator lets
    # it).
    same(subject, [prompt(500, 100 + i % 6) for i in range(20)])


def test_two_after_over_budget(subject: Subject) -> None:
    same(subject, TWO)


def test_lengths_at_block_edges(subject: Subject) -> None:
    same(
        subject,
        [prompt(n, 200 + n) for n in (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 255, 256, 257)],
    )


def test_too_long_is_cut(subject: Subject) -> None:
    long, full = prompt(1500, 9), prompt(subject.max_model_len - 1, 10)
    check(
        subject,
        [long, prompt(4, 11), full],
        [long[: subject.max_model_len - 1], prompt(4, 11), full],
    )


def test_single(subject: Subject) -> None:
    same(subject, [prompt(33, 12)])


def test_two_dimensional_tensor(subject: Subject) -> None:
    rows = [prompt(24, 13), prompt(24, 14), prompt(24, 15)]
    check(subject, torch.tensor(rows), rows)


def test_list_of_tensors(subject: Subject) -> None:
    check(subject, [torch.tensor(ids) for ids in TWO], TWO)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param([[1, 2, VOCABULARY + 9], [4, 5]], id="outside-the-vocabulary"),
        pytest.param([[1, 2], []], id="empty-sequence"),
        pytest.param([[3, -1]], id="negative"),
        pytest.param([], id="empty-batch"),
    ],
)
def test_bad_input_then_good(subject: Subject, bad: list[list[int]]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"\S"):
        subject.generator.generate(bad)
    same(subject, TWO)
