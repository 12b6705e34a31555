"""Environment variables that are set while something runs, and not longer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["variables"]


@contextlib.contextmanager
def variables(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Sets variables of this process, and puts back what was there.

    Args:
        values: names and what they are to be.
        unless_set: leave alone those that the user has set.
    """
    names = [name for name in values if not (unless_set and name in os.environ)]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: values[name] for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
