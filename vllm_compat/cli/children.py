"""Has the processes that ``run``'s script starts turn the patches on too.

A forked process has them. A spawned one is a new interpreter: multiprocessing sends it a
dictionary (paths, argv, the main file) that it unpickles before anything else. Into that goes
one more value, whose unpickling calls ``apply()``; multiprocessing passes over keys that it
doesn't know. Only the process of ``run`` and its children are touched by this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["apply_in_spawned"]

_KEY = "vllm_compat"


class _Applied:
    """Pickles as a call of :func:`apply_in_spawned` and ``apply()``."""

    def __init__(self, *options: str | None) -> None:
        self._options = options

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str | None, ...]]:
        return _arrived, self._options


def apply_in_spawned(transport: str | None, executor: str | None, untested: str | None) -> None:
    """From now on, processes spawned by multiprocessing begin with ``apply()``.

    Args:
        transport: as for ``apply()``; so are the other two.
    """
    from multiprocessing import spawn

    original = spawn.get_preparation_data
    if getattr(original, "__vllm_compat__", False):
        return

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        data[_KEY] = _Applied(transport, executor, untested)
        return data

    get_preparation_data.__vllm_compat__ = True  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data


def _arrived(transport: Any, executor: Any, untested: Any) -> None:
    """Called in the new process."""
    from ..activation import apply

    apply_in_spawned(transport, executor, untested)
    # The parent has warned already.
    apply(transport=transport, executor=executor, untested=untested or "allow")
