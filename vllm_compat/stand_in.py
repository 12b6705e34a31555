"""An object in place of another one, of which it changes some part."""

from __future__ import annotations

from typing import Any

__all__ = ["StandIn"]


class StandIn:
    """Has the attributes of the original, except for those that a subclass has of its own.

    Args:
        original: what it stands for.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
