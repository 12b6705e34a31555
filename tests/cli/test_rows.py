"""The comparison of rows: each fault that it is there for, and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.checks import rows
from vllm_compat.checks.rows import Limits, Moved, compare, compare_rows

LAYERS = [3, 1]
WIDTH = 64
NOISE = 0.01

States = list[list[torch.Tensor]]


def reference(lengths: list[int], seed: int = 0) -> States:
    torch.manual_seed(seed)
    return [[torch.randn(n, WIDTH) * (layer + 1) for layer in LAYERS] for n in lengths]


def noisy(states: States) -> States:
    """As another program would compute them: the noise of bf16."""
    torch.manual_seed(7)
    return [[s + NOISE * s.std() * torch.randn_like(s) for s in layers] for layers in states]


def test_right_rows_are_right() -> None:
    want = reference([1, 2, 40, 33])
    result = compare(noisy(want), want, LAYERS)
    assert result.wrong == []
    assert [layer.layer for layer in result.layers] == LAYERS
    for layer in result.layers:
        assert 0.5 * NOISE < layer.mean < 2 * NOISE
        assert layer.worst >= layer.median
        prompt, position = layer.worst_at
        assert float(layer.errors[prompt][position]) == pytest.approx(layer.worst)


@settings(deadline=None, max_examples=60)
@given(
    shift=st.integers(-9, 9).filter(bool),
    first=st.integers(0, 30),
    count=st.integers(1, 20),
    prompt=st.integers(0, 2),
    place=st.integers(0, 1),
)
def test_a_shift_is_found_with_its_size(
    shift: int, first: int, count: int, prompt: int, place: int
) -> None:
    want = reference([60, 60, 60])
    got = noisy(want)
    first = max(first, -shift)
    last = min(first + count, 60 - shift) - 1
    right = got[prompt][place].clone()
    got[prompt][place][first : last + 1] = right[first + shift : last + 1 + shift]
    result = compare(got, want, LAYERS)
    assert result.moved == [Moved(prompt, LAYERS[place], first, last, prompt, shift)]
    assert f"shifted by {shift:+d}" in result.wrong[0]
    assert result.shifts() == [(f"shifted by {shift:+d}", last - first + 1)]


def test_rows_of_another_prompt_are_named() -> None:
    want = reference([20, 30])
    got = noisy(want)
    got[0][1][4:9] = got[1][1][10:15]
    result = compare(got, want, LAYERS)
    assert result.moved == [Moved(0, 1, 4, 8, 1, 6)]
    assert "positions 4 to 8 hold the rows of positions 10 to 14 of prompt 1" in result.wrong[0]


def test_of_equal_rows_the_nearest_place_is_named() -> None:
    """Prompts with a beginning in common: the first that comes would be prompt 0."""
    want = reference([20, 30])
    for place in range(len(LAYERS)):
        want[1][place][:20] = want[0][place]
    got = noisy(want)
    got[1][0][4:9] = got[1][0][7:12].clone()
    assert compare(got, want, LAYERS).moved == [Moved(1, 3, 4, 8, 1, 3)]


def test_a_moved_row_that_is_near_its_own_is_found() -> None:
    """Tokens that come often have similar rows: an error of 10 % only, within the limit."""
    want = reference([20])
    want[0][0][11] = want[0][0][5] + 0.1 * want[0][0].std() * torch.randn(WIDTH)
    got = [[s + 0.1 * NOISE * torch.randn_like(s) for s in layers] for layers in want]
    got[0][0][11] = got[0][0][5]
    result = compare(got, want, LAYERS)
    assert float(result.layers[0].errors[0][11]) < Limits().row
    assert result.moved == [Moved(0, LAYERS[0], 11, 11, 0, -6)]


def test_equal_rows_are_no_fault() -> None:
    """Prompts with a beginning in common have the very same rows there."""
    want = reference([20, 20])
    for place in range(len(LAYERS)):
        want[1][place][:9] = want[0][place][:9]
    assert compare(noisy(want), want, LAYERS).wrong == []
    assert compare(want, want, LAYERS).wrong == []


def test_layers_taken_for_one_another_are_named() -> None:
    want = reference([20, 12])
    got = [[layers[1], layers[0]] for layers in noisy(want)]
    wrong = compare(got, want, LAYERS).wrong
    assert "layer 3: these are rather the states of layer 1" in wrong
    assert "layer 1: these are rather the states of layer 3" in wrong


def test_a_scale_is_named() -> None:
    want = reference([20, 12])
    got = [[layers[0], 2 * layers[1]] for layers in noisy(want)]
    wrong = compare(got, want, LAYERS).wrong
    assert "layer 1: the states are 2.00 times those of the reference" in wrong
    assert not any("layer 3" in sentence for sentence in wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong(value: float) -> None:
    want = reference([20])
    got = noisy(want)
    got[0][1][13, 5] = value
    result = compare(got, want, LAYERS)
    assert "prompt 0, layer 1, position 13: not finite" in result.wrong


def test_a_row_of_garbage_is_wrong() -> None:
    want = reference([20])
    got = noisy(want)
    got[0][1][13] = torch.randn(WIDTH) * 3
    result = compare(got, want, LAYERS)
    (sentence,) = result.wrong
    assert sentence.startswith("prompt 0, layer 1, position 13: ")


def test_a_small_error_everywhere_is_wrong() -> None:
    want = reference([20])
    got = [[s * 1.1 for s in layers] for layers in want]
    wrong = compare(got, want, LAYERS).wrong
    assert "prompt 0, layer 3: rows are 10.0 % off on average" in wrong
    assert compare(got, want, LAYERS, Limits(mean=0.11)).wrong == []


def test_missing_rows_are_wrong() -> None:
    want = reference([20, 5])
    got = noisy(want)
    got[1][0] = got[1][0][:-1]
    result = compare(got, want, LAYERS)
    assert result.wrong == ["prompt 1, layer 3: [4, 64] in place of [5, 64]"]


def test_many_rows_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a number of rows only suspects are held against all others, in parts."""
    monkeypatch.setattr(rows, "_ALL_ROWS", 10)
    monkeypatch.setattr(rows, "_CHUNK", 7)
    want = reference([60, 60])
    got = noisy(want)
    got[1][0][10:40] = got[1][0][12:42].clone()
    assert compare(got, want, LAYERS).moved == [Moved(1, 3, 10, 39, 1, 2)]


def test_ranges_of_positions_cover_each_once() -> None:
    want = reference([1, 2, 37])
    table = compare(noisy(want), want, LAYERS).by_position()
    assert [p for first, last, _ in table for p in range(first, last + 1)] == list(range(37))
    assert table[0][:2] == (0, 0)
    assert all(len(errors) == len(LAYERS) for _, _, errors in table)


def test_compare_rows() -> None:
    want = reference([6])[0][0]
    got = want.clone()
    got[2] = want[4]
    errors, nearest, ratios = compare_rows(got, want)
    assert errors[2] > 0.5
    assert int(nearest[2]) == 4
    assert float(ratios[2]) > 1e6
    assert not (nearest == torch.arange(6)).any()
    assert float(errors.sum()) == float(errors[2])
    one = compare_rows(want[:1], want[:1])
    assert [float(x) for x in one] == [0.0, 0.0, 0.0]
