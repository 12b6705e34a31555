"""Which samples a run computes, and in which batches."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from .errors import ExtractError

__all__ = ["Work", "batches", "check_part", "part"]


@dataclass(frozen=True)
class Work:
    """A batch: the samples [start, end), and those of them whose files are missing."""

    start: int
    end: int
    wanted: tuple[int, ...]


def check_part(start: int | None, end: int | None, shard: tuple[int, int] | None) -> None:
    """Refuses parts that no data has.

    Raises:
        ExtractError: the option, and what is possible.
    """
    if shard is not None:
        if start is not None or end is not None:
            raise ExtractError("--shard can't be given together with --start or --end.")
        number, parts = shard
        if not 0 <= number < parts:
            raise ExtractError(f"--shard {number}/{parts}: the first of {parts} is 0/{parts}.")
    elif (start or 0) < 0 or (end is not None and end <= (start or 0)):
        raise ExtractError(f"--start {start or 0} --end {end}: there is no sample between.")


def part(
    total: int,
    batch_size: int,
    start: int | None,
    end: int | None,
    shard: tuple[int, int] | None,
) -> tuple[int, int]:
    """The samples of a run, [low, high). A shard beyond the batches that there are has none.

    Raises:
        ExtractError: there is no sample that was asked for.
    """
    check_part(start, end, shard)
    if shard is not None:
        number, parts = shard
        count = -(-total // batch_size)
        # Whole batches: none is computed by two shards.
        low, high = (count * p // parts * batch_size for p in (number, number + 1))
        return min(low, total), min(high, total)
    low, high = start or 0, total if end is None else min(end, total)
    if low >= high:
        raise ExtractError(f"--start {low} --end {high}: there are samples 0 to {total - 1}.")
    return low, high


def batches(
    start: int, end: int, total: int, batch_size: int, found: Container[int]
) -> Iterator[Work]:
    """The batches with samples in [start, end) that aren't found.

    Their borders are those of all data, whatever part of it is wanted.
    """
    for first in range(start // batch_size * batch_size, end, batch_size):
        last = min(first + batch_size, total)
        wanted = tuple(i for i in range(max(first, start), min(last, end)) if i not in found)
        if wanted:
            yield Work(first, last, wanted)
