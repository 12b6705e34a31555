"""The door: what is taken as a batch of prompts, and what is refused, with which words."""

from __future__ import annotations

import array
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_compat.errors import InvalidInputError
from vllm_compat.prompts import check_layer_ids, check_prompts

VOCABULARY = 1000
ids = st.integers(0, VOCABULARY - 1)
FORMS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "tensor": torch.tensor,
    "int32 tensor": lambda p: torch.tensor(p, dtype=torch.int32),
    "view": lambda p: torch.tensor([p, p]).T[:, 0],
    "array": numpy.array,
    "uint16 array": lambda p: numpy.array(p, dtype=numpy.uint16),
    "array.array": lambda p: array.array("q", p),
    "list of 0-d tensors": lambda p: [torch.tensor(t) for t in p],
    "list of numpy ints": lambda p: [numpy.int32(t) for t in p],
    "iterator": iter,
}


@given(
    prompts=st.lists(st.lists(ids, min_size=1, max_size=20), min_size=1, max_size=5),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=5, max_size=5),
    max_len=st.integers(1, 25),
)
def test_every_form_of_a_prompt(
    prompts: list[list[int]], forms: list[str], max_len: int
) -> None:
    batch = [FORMS[form](prompt) for form, prompt in zip(forms, prompts, strict=False)]
    checked = check_prompts(batch, VOCABULARY, max_len)
    assert checked == [prompt[:max_len] for prompt in prompts]
    assert all(type(token) is int for prompt in checked for token in prompt)


@pytest.mark.parametrize("form", [torch.tensor, numpy.array, tuple, list])
def test_every_form_of_a_batch(form: Any) -> None:
    rows = [[1, 2, 3], [4, 5, 6]]
    assert check_prompts(form(rows), VOCABULARY, 2) == [[1, 2], [4, 5]]


def test_the_callers_lists_are_left_alone() -> None:
    batch = [[1, 2, 3]]
    checked = check_prompts(batch, VOCABULARY, 2)
    checked[0].append(9)
    assert batch == [[1, 2, 3]]
    whole = check_prompts(batch, VOCABULARY, 5)
    whole[0].append(9)
    assert batch == [[1, 2, 3]]


REFUSED: list[Any] = [
    ([], "The batch is empty"),
    (torch.zeros(0, 5, dtype=torch.long), "The batch is empty"),
    ([[1], []], "Sequence 1 is empty"),
    (torch.zeros(2, 0, dtype=torch.long), "Sequence 0 is empty"),
    ([[1, 2], [3, VOCABULARY]], r"Sequence 1, position 1: token id 1000 .*\[0, 999\]"),
    ([[1, 2**70]], r"Sequence 0, position 1: token id 1180591620717411303424 "),
    ([[5, -1]], "Sequence 0, position 1: token id -1 "),
    ([[1.0]], r"Sequence 0, position 0: 1.0 is not an integer"),
    ([[1, 2.5]], r"Sequence 0, position 1: 2.5 is not an integer"),
    (torch.tensor([[1.0, 2.0]]), "Sequence 0, position 0: 1.0 is not an integer"),
    ([numpy.array([1.0])], "Sequence 0, position 0: 1.0 is not an integer"),
    ([[1, True]], "Sequence 0, position 1: True is not an integer"),
    (torch.tensor([[True]]), "Sequence 0, position 0: True is not an integer"),
    ([[1, None]], "Sequence 0, position 1: None is not an integer"),
    ([[1, "2"]], "Sequence 0, position 1: '2' is not an integer"),
    ([[[1]]], r"Sequence 0, position 0: \[1\] is not an integer"),
    ([[torch.tensor(1.0)]], "Sequence 0, position 0: .* is not an integer"),
    (torch.zeros(1, 2, 3, dtype=torch.long), "Sequence 0, position 0: .* is not an integer"),
    ([1, 2, 3], "sequence 0 is a int"),
    (torch.tensor([1, 2, 3]), "sequence 0 is a int"),
    (7, "the batch is a int"),
    (None, "the batch is a NoneType"),
    ([None], "sequence 0 is a NoneType"),
    ("text", "the batch is text"),
    (["text"], "sequence 0 is text"),
    ([b"text"], "sequence 0 is text"),
    ({"input_ids": [[1]]}, "the batch is a dict"),
    ([{1: 2}], "sequence 0 is a dict"),
    ([{1, 2, 3}], "sequence 0 is a set, which has no order"),
    ({(1, 2), (3,)}, "the batch is a set, which has no order"),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED, ids=str)
def test_refused(batch: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        check_prompts(batch, VOCABULARY, 100)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 300


def test_a_message_is_short_however_long_the_input() -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_prompts([[[1] * 10_000]], VOCABULARY, 100)
    assert len(str(caught.value)) < 300


def test_an_id_beyond_the_cut_is_still_looked_at() -> None:
    with pytest.raises(InvalidInputError, match="position 9"):
        check_prompts([[1] * 9 + [VOCABULARY]], VOCABULARY, 5)


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, numpy.array])
def test_layer_ids_in_any_form(form: Any) -> None:
    assert check_layer_ids(form([3, 1, 3])) == [3, 1, 3]
    assert check_layer_ids(None) is None


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ([], "layer_ids is empty"),
        ([1.0], r"1\.0 is not an integer"),
        ([True], "True is not an integer"),
        (["1"], "'1' is not an integer"),
        ("12", "layer_ids is text"),
        (3, "layer_ids is a int"),
        ({1, 2}, "layer_ids is a set, which has no order"),
    ],
)
def test_layer_ids_refused(layer_ids: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        check_layer_ids(layer_ids)
