"""Every environment variable of this package, and what ``apply()`` can be asked for.

A new variable is a new field of :class:`Settings`, and a row in docs/guest.md: a test compares
the two. Nothing else in the package reads a variable whose name begins with ``VLLM_COMPAT_``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .errors import InvalidInputError

__all__ = ["CHOICES", "Options", "Settings", "Untested", "Variable", "one_of"]

Untested = Literal["warn", "refuse", "allow"]
"""What to do on a vLLM newer than any tested one."""

CHOICES: dict[str, tuple[str, ...]] = {
    "transport": ("auto", "shared", "rpc"),
    "executor": ("mp", "ray"),
    "untested": ("warn", "refuse", "allow"),
}
"""The values that each argument of ``apply()`` can have; the first is the default."""


@dataclass(frozen=True)
class Options:
    """What ``apply()`` was asked for; read by the adapters.

    Attributes:
        transport: how rows go from worker to driver: ``shared`` memory, vLLM's own ``rpc``
            queue, or ``auto``: shared where it can be, else rpc.
        executor: vLLM's ``distributed_executor_backend``: ``mp`` or ``ray``.
    """

    transport: Literal["auto", "shared", "rpc"] = "auto"
    executor: Literal["mp", "ray"] = "mp"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: of the variable.
        meaning: what docs/guest.md says of it.
        parse: turns its text into the value of the field; the first argument is the name.
            Raises InvalidInputError.
    """

    name: str
    meaning: str
    parse: Callable[[str, str], Any]


def one_of(name: str, value: str, allowed: Collection[str]) -> str:
    """The value, if it is allowed.

    Raises:
        InvalidInputError: it isn't; the message has the name and what is allowed.
    """
    if value not in allowed:
        raise InvalidInputError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return value


def _variable(name: str, default: Any, meaning: str, parse: Callable[[str, str], Any]) -> Any:
    return field(default=default, metadata={"variable": Variable(name, meaning, parse)})


def _choice(argument: str) -> Callable[[str, str], str]:
    return lambda name, text: one_of(name, text, CHOICES[argument])


def _names(name: str, text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidInputError(f"{name}={text!r} is not a share of the time, from 0 to 1.")
    return share


@dataclass(frozen=True)
class Settings:
    """What the environment variables say. One that isn't set, or is empty, says nothing.

    Attributes:
        disable: apply() does nothing.
        skip: names of patches to leave out.
        untested: what to do on a vLLM newer than any tested one.
        transport: how rows travel where apply() wasn't told.
        canary: the share of the time, from 0 to 1, in which sequences are computed a second
            time (:mod:`vllm_compat.canary`).
    """

    disable: bool = _variable(
        "VLLM_COMPAT_DISABLE",
        False,
        "`1`: `apply()` does nothing, and says so in the log",
        lambda name, text: text != "0",
    )
    skip: frozenset[str] = _variable(
        "VLLM_COMPAT_SKIP",
        frozenset(),
        "names of patches to leave out, with commas",
        _names,
    )
    untested: Literal["warn", "refuse", "allow"] = _variable(
        "VLLM_COMPAT_UNTESTED",
        "warn",
        "on a vLLM newer than any tested: `warn` (once), `refuse`, `allow`",
        _choice("untested"),
    )
    transport: Literal["auto", "shared", "rpc"] = _variable(
        "VLLM_COMPAT_TRANSPORT",
        "auto",
        "`auto`, `shared` or `rpc`",
        _choice("transport"),
    )
    canary: float = _variable(
        "VLLM_COMPAT_CANARY",
        0.01,
        "the share of the time in which sequences are [computed a second time]"
        "(correctness.md#what-is-proved-and-what-is-not): `0.01`; `0`: never",
        _share,
    )

    @classmethod
    def variables(cls) -> dict[str, Variable]:
        """Field name to the environment variable that sets it."""
        return {f.name: f.metadata["variable"] for f in fields(cls)}

    @classmethod
    def read(cls, patches: Collection[str] | None = None) -> Settings:
        """Parses and checks all variables of this process.

        Args:
            patches: names of all patches, for ``VLLM_COMPAT_SKIP``; None leaves those
                unchecked.

        Raises:
            InvalidInputError: a sentence for each variable that has a wrong value. Not if
                ``VLLM_COMPAT_DISABLE`` is set: who switches us off has no use for it.
        """
        values: dict[str, Any] = {}
        wrong: list[str] = []
        for name, variable in cls.variables().items():
            try:
                if text := os.environ.get(variable.name):
                    values[name] = variable.parse(variable.name, text)
            except InvalidInputError as error:
                wrong.append(str(error))
        unknown = values.get("skip", frozenset()) - frozenset(patches or ())
        if unknown and patches is not None:
            wrong.append(
                f"VLLM_COMPAT_SKIP names no patch of ours: {', '.join(sorted(unknown))}."
            )
        if wrong and not values.get("disable"):
            raise InvalidInputError(" ".join(wrong))
        return cls(**values)
