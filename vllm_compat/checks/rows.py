"""Compares rows of states with a reference, and says of a wrong row whose it is.

A row is the state of one token at one layer. Its error is the length of the difference over
the length of the reference, ``|got - want| / |want|``. Right rows differ by the noise of
different kernels and dtypes; a row of another token is off by its own length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

__all__ = ["Comparison", "LayerErrors", "Limits", "Moved", "compare", "compare_rows"]

_CHUNK = 1024  # rows whose distances to all others are held in memory at a time
_ALL_ROWS = 4096  # up to so many rows each one is held against all others
_SUSPECT = 0.02  # beyond that, only rows with a larger error; a moved row has one
_FAR = 1 << 40  # more than any position
_AS_NEAR = 1.05  # distances within that factor are the same one, computed twice
_EXACT = 1e-6  # relative error of a distance that comes from a product of matrices


@dataclass(frozen=True)
class Limits:
    """Beyond which a state is called wrong.

    They stand between what was measured for right states of a model in bf16 (a layer's rows
    0.5 to 4 % off on average, single rows, the few that serve attention as a sink, up to 20 %)
    and what the smallest of the known faults makes of them (one layer taken for the next 19 %
    on average at least, a row from elsewhere in the prompt 70 to 100 % in the middle).

    Attributes:
        mean: of the errors of a layer's rows in one prompt.
        row: of the error of one row.
        nearer: how many times nearer another row of the reference may be than its own. Tokens
            that come often have similar rows everywhere, so that a row in the wrong place can
            be within ``row``; right rows came to 2.1 at most, and of rows that were moved 99 %
            are over 12.
    """

    mean: float = 0.08
    row: float = 0.4
    nearer: float = 4.0


@dataclass(frozen=True)
class Moved:
    """A run of neighbouring rows that are another place's.

    Attributes:
        prompt: index of the prompt in which they are.
        layer: layer id.
        first: their first position.
        last: their last position.
        whose: index of the prompt whose rows they are.
        shift: what to add to a position to get the position whose row is there.
    """

    prompt: int
    layer: int
    first: int
    last: int
    whose: int
    shift: int

    def __str__(self) -> str:
        rows = self.last - self.first + 1
        here = _positions(self.first, self.last)
        there = _positions(self.first + self.shift, self.last + self.shift)
        verb = "holds the row" if rows == 1 else "hold the rows"
        where = f"prompt {self.prompt}, layer {self.layer}: {here} {verb} of {there}"
        if self.whose != self.prompt:
            return f"{where} of prompt {self.whose}"
        return f"{where} (shifted by {self.shift:+d})"


def _positions(first: int, last: int) -> str:
    return f"position {first}" if first == last else f"positions {first} to {last}"


@dataclass
class LayerErrors:
    """Errors of all rows of one layer.

    Attributes:
        layer: layer id.
        errors: one tensor [tokens of the prompt] for each prompt.
        mean, median, worst: over all rows.
        worst_at: prompt and position of the worst row.
    """

    layer: int
    errors: list[torch.Tensor]
    mean: float = 0.0
    median: float = 0.0
    worst: float = 0.0
    worst_at: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        rows = torch.cat(self.errors).nan_to_num(nan=math.inf)
        self.mean = float(rows.mean())
        self.median = float(rows.median())
        index = int(rows.argmax())
        self.worst = float(rows[index])
        prompt = 0
        while index >= len(self.errors[prompt]):
            index -= len(self.errors[prompt])
            prompt += 1
        self.worst_at = (prompt, index)


@dataclass
class Comparison:
    """What :func:`compare` found. ``wrong`` has a sentence for each fault; empty is right."""

    layers: list[LayerErrors]
    lengths: list[int]
    limits: Limits
    moved: list[Moved] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def shifts(self) -> list[tuple[str, int]]:
        """How rows moved, in words, and how many did so; the most frequent first."""
        counts: Counter[str] = Counter()
        for m in self.moved:
            how = f"shifted by {m.shift:+d}" if m.whose == m.prompt else "of another prompt"
            counts[how] += m.last - m.first + 1
        return counts.most_common()

    def by_position(self) -> list[tuple[int, int, list[float]]]:
        """Mean error for ranges of positions that double in length.

        Returns:
            First and last position of the range, and the mean error at each layer.
        """
        table = []
        first, longest = 0, max(self.lengths)
        while first < longest:
            last = min(max(2 * first, first + 1), longest)  # exclusive: 0, 1, 2-3, 4-7, ...
            errors = [
                float(torch.cat([e[first:last] for e in layer.errors]).mean())
                for layer in self.layers
            ]
            table.append((first, last - 1, errors))
            first = last
        return table


def compare(
    got: Sequence[Sequence[torch.Tensor]],
    want: Sequence[Sequence[torch.Tensor]],
    layer_ids: Sequence[int],
    limits: Limits | None = None,
) -> Comparison:
    """Compares the states of some prompts with a reference.

    Args:
        got: for each prompt a list with one tensor [tokens, hidden] for each layer.
        want: the reference, in the same form.
        layer_ids: the layers, in the order of the lists.
        limits: what is wrong; by default :class:`Limits`'s.
    """
    limits = limits or Limits()
    lengths = [len(states[0]) for states in want]
    result = Comparison([], lengths, limits)
    for place, layer in enumerate(layer_ids):
        mine = [states[place] for states in got]
        right = [states[place] for states in want]
        if shapes := _shapes(mine, right, layer):
            result.wrong += shapes
            continue
        errors, moved = _compare_layer(mine, right, layer, limits)
        result.layers.append(LayerErrors(layer, errors))
        result.moved += moved
        result.wrong += [str(m) for m in moved]
        result.wrong += _over_the_limits(errors, moved, layer, limits)
        if any(float(e.mean()) > limits.mean for e in errors):
            result.wrong += _whole_layer(mine, want, place, layer_ids)
    return result


def compare_rows(
    got: torch.Tensor, want: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compares row i of ``got`` with row i of ``want`` and with all its other rows.

    Args:
        got: [n, hidden].
        want: [n, hidden].

    Returns:
        Each [n]: the error of the row; the other position whose reference is nearest to it;
        how many times nearer that one is than its own (0 if there is no other).
    """
    own = _indices(len(got), got.device)
    errors = relative_errors(got, want)
    nearest, ratios = _nearest_others(got, want, own, own, torch.zeros_like(own))
    return errors, nearest, ratios


def _indices(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)


def relative_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """``|got - want| / |want|`` of each row, in float64; [n]."""
    got, want = got.double(), want.double()
    return (got - want).norm(dim=1) / want.norm(dim=1)


def _nearest_others(
    got: torch.Tensor,
    want: torch.Tensor,
    own: torch.Tensor,
    positions: torch.Tensor,
    prompts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of ``got``, [m, hidden], the nearest row of ``want`` that isn't ``own``.

    Prompts with a beginning in common have the same rows there. Of rows that are as near as
    one another the one of the same prompt is taken, and of those the one least far away.

    Args:
        positions: of each row of ``want`` in its prompt.
        prompts: index of the prompt of each row of ``want``.

    Returns:
        Its index, and how many times nearer it is than the own one; each [m].
    """
    nearest = torch.zeros(len(got), dtype=torch.long, device=got.device)
    ratios = torch.zeros(len(got), dtype=torch.double, device=got.device)
    if len(want) == 1:
        return nearest, ratios
    # In float64 the distances can come from a product of matrices, the fast way.
    reference = want.double()
    for begin in range(0, len(got), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        rows, mine = got[part].double(), own[part]
        distances = torch.cdist(rows, reference, compute_mode="use_mm_for_euclid_dist")
        to_own = (rows - reference[mine]).norm(dim=1)
        distances[_indices(len(rows), rows.device), mine] = math.inf
        least = distances.min(dim=1).values
        away = (positions[None, :] - positions[mine][:, None]).abs()
        away += _FAR * (prompts[None, :] != prompts[mine][:, None])
        away[distances > (_AS_NEAR * least + _EXACT * rows.norm(dim=1))[:, None]] = 2 * _FAR
        nearest[part] = away.argmin(dim=1)
        # Equal tokens at the start of equal texts can have the very same row: 0 / 0 is no
        # fault.
        ratios[part] = (to_own / least).nan_to_num(nan=0.0, posinf=math.inf)
    return nearest, ratios


def _shapes(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], layer: int) -> list[str]:
    return [
        f"prompt {index}, layer {layer}: {list(mine.shape)} in place of {list(right.shape)}"
        for index, (mine, right) in enumerate(zip(got, want, strict=True))
        if mine.shape != right.shape
    ]


def _compare_layer(
    got: list[torch.Tensor], want: list[torch.Tensor], layer: int, limits: Limits
) -> tuple[list[torch.Tensor], list[Moved]]:
    lengths = [len(rows) for rows in want]
    mine, right = torch.cat(list(got)), torch.cat(list(want))
    errors = relative_errors(mine, right)
    candidates = _indices(len(mine), mine.device)
    if len(mine) > _ALL_ROWS:
        candidates = (errors > _SUSPECT).nonzero().flatten()
    positions = torch.cat([_indices(n, mine.device) for n in lengths])
    prompts = torch.repeat_interleave(
        torch.tensor(lengths, dtype=torch.int64, device=mine.device)
    )
    nearest, ratios = _nearest_others(mine[candidates], right, candidates, positions, prompts)
    elsewhere = ratios > limits.nearer
    pairs = list(zip(candidates[elsewhere].tolist(), nearest[elsewhere].tolist(), strict=True))
    return list(errors.split(lengths)), _runs(pairs, lengths, layer)


def _runs(pairs: list[tuple[int, int]], lengths: list[int], layer: int) -> list[Moved]:
    """Puts rows that moved together into one."""
    owner = [(p, i) for p, length in enumerate(lengths) for i in range(length)]
    rows = []
    for index, source in pairs:
        (prompt, position), (whose, there) = owner[index], owner[source]
        rows.append((prompt, whose, there - position, position))
    found = []
    for (prompt, whose, shift), group in groupby(rows, key=lambda row: row[:3]):
        positions = [row[3] for row in group]
        start = positions[0]
        for before, after in zip(positions, [*positions[1:], None], strict=True):
            if after != before + 1:
                found.append(Moved(prompt, layer, start, before, whose, shift))
                start = after if after is not None else start
    return found


def _over_the_limits(
    errors: list[torch.Tensor], moved: list[Moved], layer: int, limits: Limits
) -> list[str]:
    explained = {(m.prompt, p) for m in moved for p in range(m.first, m.last + 1)}
    found = []
    for prompt, rows in enumerate(errors):
        # Written so that NaN is wrong: it is neither smaller nor larger than a limit.
        over = (~(rows <= limits.row)).nonzero().flatten().tolist()
        bad = [p for p in over if (prompt, p) not in explained]
        where = f"prompt {prompt}, layer {layer}"
        if len(bad) > 3:
            found.append(
                f"{where}: {len(bad)} of {len(rows)} rows are more than "
                f"{100 * limits.row:.0f} % off, the first at position {bad[0]}"
            )
        else:
            found += [f"{where}, position {p}: {_off(float(rows[p]))}" for p in bad]
        rest = [float(rows[p]) for p in range(len(rows)) if (prompt, p) not in explained]
        mean = sum(rest) / len(rest) if rest else 0.0
        if not mean <= limits.mean and not bad:
            found.append(f"{where}: rows are {100 * mean:.1f} % off on average")
    return found


def _off(error: float) -> str:
    return f"{100 * error:.1f} % off" if math.isfinite(error) else "not finite"


def _whole_layer(
    mine: list[torch.Tensor],
    want: Sequence[Sequence[torch.Tensor]],
    place: int,
    layer_ids: Sequence[int],
) -> list[str]:
    """What could be wrong with a layer as a whole: it is another one's, or scaled."""
    layer = layer_ids[place]
    got = torch.cat(list(mine)).double()
    for other, name in enumerate(layer_ids):
        reference = torch.cat([states[other] for states in want]).double()
        if (
            other != place
            and name != layer
            and float(_error(got, reference))
            < 0.5 * float(_error(got, torch.cat([states[place] for states in want]).double()))
        ):
            return [f"layer {layer}: these are rather the states of layer {name}"]
    reference = torch.cat([states[place] for states in want]).double()
    factor = float((got * reference).sum() / reference.square().sum())
    if factor and float(_error(got / factor, reference)) < 0.25 * float(_error(got, reference)):
        return [f"layer {layer}: the states are {factor:.2f} times those of the reference"]
    return []


def _error(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return ((got - want).norm(dim=1) / want.norm(dim=1)).median()
