"""Numbers on a command line: a wrong one is a usage error, as argparse tells them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["at_least", "fraction"]


def at_least(least: int) -> Callable[[str], int]:
    """For argparse's ``type``: an integer that is not less."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: at least {least} is needed")
        return value

    return integer


def fraction(text: str) -> float:
    """For argparse's ``type``: more than 0, at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a part of 1")
    return value
