"""Asks a module as what it takes a pair: as a state and a left-over, or as two terms of a sum.

The module, a decoder layer or the final norm, runs twice more, on two other pairs:

* with the sum split in another way, the two tensors swapped in the main. The exact sum of each
  element stays what it was, so a module that adds the two computes the same bits again,
  however large its numbers are, however much it amplifies, and whatever its weights are
  rounded to. A module that does anything else with them doesn't;
* with another residual. A module that ignores the residual computes the same bits again.

What one changes is compared with what the other changes, row by row, so that no limit depends
on the size of the activations. Every row is an experiment of its own, since attention is silent
and a layer then does nothing across rows.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from .decoder import hidden_of, residual_of

__all__ = ["Again", "Call", "Taken", "ask", "pair_of", "places_of", "sum_of", "verdict"]

Taken = Literal["hidden", "hidden+residual", "neither"]

Again = Callable[[], AbstractContextManager[Any]]
"""Opens, for each further run of a module, the context in which it began."""

# A module that takes the pair as one or the other reacts to one of the two changes alone. This
# is the largest reaction to the other, as a share, that is still put down to rounding. Adding
# with a wrong factor (a sum of one rank only: 1/2 and less) gives a share near 1.
_NOTHING = 0.02
# The smallest change of a row, as a share of the larger tensor, that asks anything.
_CHANGED = 0.1
# Of the rows that answer, how many have to say the same: with other rounding (atomic adds in a
# GPU kernel) a token may go to another expert.
_MAJORITY = 0.75
# Of all rows, how many have to answer.
_QUORUM = 0.25


@dataclass(frozen=True)
class Call:
    """The arguments of a call, copied: the fused kernels write into what they are given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def copied(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return cls(tuple(map(_cloned, args)), {k: _cloned(v) for k, v in kwargs.items()})

    def tensors(self) -> dict[int | str, torch.Tensor]:
        """Each tensor by its place or name."""
        places: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {key: value for key, value in places if isinstance(value, torch.Tensor)}

    def run(
        self, module: nn.Module, replaced: dict[int | str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The module on these arguments, some replaced: its first tensor, and its second.

        ``forward`` and not the call, which would run the hooks again.
        """
        args = [_cloned(replaced.get(i, value)) for i, value in enumerate(self.args)]
        kwargs = {k: _cloned(replaced.get(k, value)) for k, value in self.kwargs.items()}
        return pair_of(module.forward(*args, **kwargs))


def verdict(answers: Sequence[Taken | None]) -> Taken | None:
    """What the rows say together; None if too few of them say anything."""
    counts = Counter(answer for answer in answers if answer is not None)
    said = counts.total()
    if said == 0 or said < _QUORUM * len(answers):
        return None
    answer, count = counts.most_common(1)[0]
    return answer if count >= _MAJORITY * said else "neither"


def ask(
    module: nn.Module,
    call: Call,
    places: tuple[int | str, int | str],
    before: tuple[torch.Tensor, ...],
    again: Again,
    number: int,
    count: int = 2,
) -> list[Taken | None]:
    """As what a module takes the pair that it is given: the answer of each row.

    Args:
        module: a decoder layer, or the final norm.
        call: what it was called with.
        places: where in the call the pair is.
        before: what it returned.
        again: opens the context in which it began.
        number: of the run; each changes the residual in another way.
        count: how many of the tensors that it returns another residual must leave alone, if
            it is to be ignored.
    """
    hidden, residual = (call.tensors()[place] for place in places)

    def answer(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        with again():
            return call.run(module, dict(zip(places, pair, strict=True)))

    split = _split_again(hidden, residual)
    # Both, whatever the first says: layers that talk to other ranks must be run as often on
    # each of them.
    with_split = answer(split)
    with_other = answer((hidden, _other_residual(hidden, residual, number)))
    if before[0].shape[:-1] != hidden.shape[:-1]:
        return [None] * hidden[..., 0].numel()
    by_split = [_moved(*tensors) for tensors in zip(with_split, before, strict=True)]
    by_other = [_moved(*tensors) for tensors in zip(with_other, before, strict=True)]
    # Each tensor by itself: beside what an amplifying layer adds, the stream that it was given
    # would be nothing, and a norm doesn't notice a factor.
    adds = _all(_little(one, other) for one, other in zip(by_split, by_other, strict=True))
    ignores = _all(
        _little(one, other)
        for one, other in zip(by_other[:count], by_split[:count], strict=True)
    )
    still = _all(
        (one == 0) & (other == 0) for one, other in zip(by_split, by_other, strict=True)
    )
    asked = _moved(split[0], hidden) >= _CHANGED * torch.maximum(_rows(hidden), _rows(residual))
    return [
        None
        if is_still or (is_sum and not was_asked)
        else "hidden"
        if is_hidden
        else "hidden+residual"
        if is_sum
        else "neither"
        for is_still, was_asked, is_hidden, is_sum in zip(
            still.tolist(), asked.tolist(), ignores.tolist(), adds.tolist(), strict=True
        )
    ]


def _split_again(
    hidden: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Another pair with exactly the same sum, element by element, as far from it as can be.

    Swapped where the dtypes are one and the two differ; else one term gets all or nothing,
    where the other can hold the rest without rounding; else the element is left as it is.
    """
    h, r = hidden.double(), residual.double()
    best = hidden.clone(), residual.clone()
    largest = torch.zeros_like(h)
    for wanted in (r, h + r, torch.zeros_like(h)):
        new = wanted.to(hidden.dtype)
        rest = (h + (r - new.double())).to(residual.dtype)
        shift = (new.double() - h).abs()
        better = (new.double() + rest.double() == h + r) & (shift > largest)
        best = torch.where(better, new, best[0]), torch.where(better, rest, best[1])
        largest = torch.where(better, shift, largest)
    return best


def _other_residual(hidden: torch.Tensor, residual: torch.Tensor, number: int) -> torch.Tensor:
    """A residual that makes another sum: the mean of ``hidden`` and a neighbour's value.

    So the sum changes by as much as is there, and stays as small: in float16 more could
    overflow.
    """
    h, r = hidden.double(), residual.double()
    neighbours = (h, r)[number % 2].roll(number + 1, -1)
    return ((neighbours - h) / 2).to(residual.dtype)


def sum_of(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float64: of two numbers of 16 bits exact, or as good as that."""
    first, *others = (term.double() for term in terms)
    return sum(others, first)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The norm of each row, in float64. [rows]"""
    tensor = tensor.reshape(-1, tensor.shape[-1]).double()
    # In two steps: squares of large numbers would overflow.
    scale = tensor.abs().amax(-1, keepdim=True)
    scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
    return torch.linalg.vector_norm(tensor / scale, dim=-1) * scale[:, 0]


def _moved(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """By how much each row has changed; infinity where it is finite no longer. [rows]"""
    rows = _rows(new.double() - old.double())
    return rows.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _all(answers: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(answers)).all(0)


def _little(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Whether ``one`` is nothing beside ``other``, for each row. [rows]

    Beside infinity (a change that overflows) anything would be little: only zero is then.
    """
    beside = torch.where(other.isfinite(), other, 0.0)
    return one.isfinite() & (one <= _NOTHING * beside)


def places_of(
    call: Call, hidden: torch.Tensor, residual: torch.Tensor, module: nn.Module
) -> tuple[int | str, int | str] | None:
    """Where in a call the pair is that the layer before has returned, if it is there."""
    tensors = call.tensors()
    first = [place for place, value in tensors.items() if _is(value, hidden)]
    second = [place for place, value in tensors.items() if _is(value, residual)]
    # A layer that changes nothing may return the same tensor twice: then the order decides,
    # unless the layer calls one of them the residual.
    names = list(inspect.signature(module.forward).parameters)

    def is_residual(place: int | str) -> bool:
        name = place if isinstance(place, str) else names[place] if place < len(names) else ""
        return "residual" in name

    pairs = [(h, r) for h in first for r in second if h != r]
    pairs.sort(key=lambda pair: (not is_residual(pair[1]), is_residual(pair[0])))
    return pairs[0] if pairs else None


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is(value: torch.Tensor, other: torch.Tensor) -> bool:
    # NaN is the same as NaN: with it on one rank only, the ranks would part ways.
    if value.size() != other.size():
        return False
    return bool(torch.equal(*map(torch.nan_to_num, (value, other))))


def pair_of(output: Any) -> tuple[torch.Tensor, ...]:
    """The first tensor of a module's return, and the second if it has its shape."""
    residual = residual_of(output)
    return (hidden_of(output),) if residual is None else (hidden_of(output), residual)
