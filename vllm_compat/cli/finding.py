"""One line of what ``doctor`` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``problem`` means that it doesn't work.
        about: a word or two.
        text: what was found.
        advice: what to change; empty if nothing.
    """

    level: Level
    about: str
    text: str
    advice: str = ""
