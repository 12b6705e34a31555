"""Rows that speculators makes no sample of, or fails of: where they are, and why.

It counts neither, and says why in its log alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .rows import place, reason_unused

__all__ = ["failing", "first_line", "unused_rows"]

_NAMED = 20  # rows that speculators passed over
_PIECE, _FEW = 1000, 100  # rows that are looked at, and prepared once more, at a time


def unused_rows(
    build: Callable[[list[Any]], int], raw: Any, chosen: list[int], count: int, data: str
) -> list[str]:
    """Names the first rows that speculators passed over, and why."""
    found: dict[int, str] = {}
    turns = raw.select_columns(["conversations"])
    for first in range(0, len(chosen), _PIECE):
        rows = chosen[first : first + _PIECE]
        for row, each in zip(rows, turns[rows]["conversations"], strict=True):
            if why := reason_unused(each):
                found[row] = why
        if len(found) >= min(count, _NAMED):
            break
    if len(found) < min(count, _NAMED):
        rest = [row for row in chosen if row not in found]
        found |= _refused(build, turns, rest)
    return [f"{place(data, row)}: {found[row]}" for row in sorted(found)[:_NAMED]]


def failing(build: Callable[[list[Any]], int], raw: Any, chosen: list[int], data: str) -> str:
    """Where the row is that the preprocessing fails of; empty if it is none by itself.

    From 0.4.0 on speculators doesn't pass over a row that the chat template raises for.
    """
    turns = raw.select_columns(["conversations"])
    rows, size = chosen, _FEW
    while rows:
        pieces = [rows[first : first + size] for first in range(0, len(rows), size)]
        rows = next((some for some in pieces if _fails(build, turns[some])), [])
        if len(rows) == 1:
            return f"{place(data, rows[0])}: "
        size = 1
    return ""


def first_line(error: BaseException) -> str:
    """Of what a library raised, the line that says what happened."""
    # `datasets` says what happened in the cause of what it raises.
    # That of one out of another process is all of its traceback, as text.
    while error.__cause__ is not None and type(error.__cause__).__name__ != "RemoteTraceback":
        error = error.__cause__
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- inside ------------------------------------------------------------------------------------


def _refused(build: Callable[[list[Any]], int], turns: Any, rows: list[int]) -> dict[int, str]:
    """Rows in the form of conversations that the chat template or the tokenizer refuses.

    Args:
        build: speculators' work on a list of conversations; how many it makes samples of.
        turns: the column.
        rows: of it, that may be refused.
    """
    found: dict[int, str] = {}
    for first in range(0, len(rows), _FEW):
        some = rows[first : first + _FEW]
        if build(turns[some]["conversations"]) == len(some):
            continue
        for row in some:
            with _said() as words:
                if not build(turns[[row]]["conversations"]):
                    found[row] = words[-1] if words else "speculators does not say why"
            if len(found) == _NAMED:
                return found
    return found


def _fails(build: Callable[[list[Any]], int], rows: Any) -> bool:
    try:
        build(rows["conversations"])
    except Exception:  # it is told already; here only whether it comes again
        return True
    return False


@contextmanager
def _said() -> Iterator[list[str]]:
    """What speculators logs: the only place where it says why it leaves a row out."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(  # type: ignore[method-assign]
        record.getMessage().partition(": ")[2] or record.getMessage().strip()
    )
    logger = logging.getLogger("speculators")
    kept = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False  # not on the terminal as well
    try:
        yield words
    finally:
        logger.removeHandler(handler)
        logger.propagate = kept
