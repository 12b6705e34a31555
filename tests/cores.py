"""Which cores a test's processes may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

ALL = os.sched_getaffinity(0)


def take_share(number: int, count: int) -> None:
    """Cores of its own for each of several processes that test at the same time.

    Teams of threads that wait by spinning, as vLLM's workers do, hardly get on where there are
    more of them than cores.
    """
    if len(ALL) >= count:
        os.sched_setaffinity(0, sorted(ALL)[number::count])


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """For what shares out the cores itself: several ranks, several replicas."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, ALL)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
