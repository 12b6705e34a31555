"""What a command can't do, in one sentence."""

from __future__ import annotations

from ..errors import VllmCompatError

__all__ = ["CommandError"]


class CommandError(VllmCompatError):
    """The command can't be carried out; the message is one sentence for its user."""
