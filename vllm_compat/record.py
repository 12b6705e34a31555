"""What a patch is: a record that says what it replaces, where it is needed and when it dies."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from .environment import GENERATOR, Environment, Package
from .symbols import Sources, Symbol

__all__ = ["Look", "Patch", "Symbol", "Wrap", "at", "bound", "module_of"]

Wrap = Callable[[Any], Any]
"""Takes what is bound at the seam (or the builtin of that name), gives what replaces it."""


@dataclass(frozen=True)
class Look:
    """What a probe may ask: the environment and the installed sources."""

    environment: Environment
    sources: Sources

    def accepts(self, symbol: str, *parameters: str) -> bool:
        """Whether the callable is there and takes all of these by keyword."""
        found = self.sources.find(symbol)
        return found is not None and found.accepts(*parameters)

    def has(self, symbol: str) -> bool:
        """Whether the symbol is there."""
        return self.sources.find(symbol) is not None

    def generator_says(self, text: str) -> bool:
        """Whether the generator's own source has this text."""
        return self.sources.says(GENERATOR, text)


@dataclass(frozen=True)
class Patch:
    """A versioned patch.

    Attributes:
        name: unique, in kebab-case; ``VLLM_COMPAT_SKIP`` takes it.
        why: one sentence: what goes wrong without it.
        upstream: where the fact comes from (file and version, or issue).
        delete_when: what has to be true for the patch to go.
        side: ``driver`` (the user's process) or ``worker`` (vLLM's worker processes).
        feature: the field of :class:`~vllm_compat.features.Features` that is true where
            this patch is on; for what an adapter of another record does differently there.
        replaces: seam (``module:attribute.path``) to the function that builds the
            replacement.
        vllm: PEP 440 specifier of the vLLM releases that need it; empty for all.
        speculators: the same for speculators.
        transformers: the same for transformers.
        needed: the probe: looks at what is installed and decides. A release number that
            disagrees with it is noted in the report, and the probe wins.
        relies_on: upstream symbols that have to be there for the patch to be right.
        around_import: context managers factories by module name; entered while that
            module is being imported for the first time.
        provides: ``module:name`` of what ``around_import`` supplies to that import.
        discards: seams of ``replaces`` at which what was there is never called again: if
            that is another library's replacement, the two can't both be on.
        anywhere: seams of ``replaces`` whose replacement acts outside of generators too: only
            names that nothing but speculators uses, and in the one way that the patch is about.
    """

    name: str
    why: str
    upstream: str
    delete_when: str
    needed: Callable[[Look], bool]
    side: Literal["driver", "worker"] = "driver"
    feature: str = ""
    replaces: Mapping[str, Wrap] = field(default_factory=dict)
    vllm: str = ""
    speculators: str = ""
    transformers: str = ""
    relies_on: tuple[Symbol, ...] = ()
    around_import: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    provides: tuple[str, ...] = ()
    discards: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()

    def expected(self, environment: Environment) -> bool | None:
        """What the release numbers say.

        Args:
            environment: what is installed.

        Returns:
            Whether the patch is needed there; None where a version says nothing.
        """
        verdicts = [
            _within(specifier, package)
            for specifier, package in (
                (self.vllm, environment.vllm),
                (self.speculators, environment.speculators),
                (self.transformers, environment.transformers),
            )
        ]
        if False in verdicts:
            return False
        return None if None in verdicts else True

    def required_symbols(self, environment: Environment) -> tuple[Symbol, ...]:
        """The symbols that have to be there on this vLLM.

        Args:
            environment: what is installed.

        Returns:
            Those of ``relies_on`` whose ``since`` fits; one with ``since`` can't be asked of
            a build whose version says nothing.
        """
        return tuple(s for s in self.relies_on if _within(s.since, environment.vllm))


def bound(seam: str, sources: Sources) -> bool:
    """Whether a module's source binds the name of a seam.

    A builtin counts: a global of ours hides it.
    """
    module, _, path = seam.partition(":")
    if "." in path:
        return sources.find(seam) is not None
    return hasattr(builtins, path) or path in sources.names(module)


def at(name: str) -> str:
    """The seam of that name in the generator's module."""
    return f"{GENERATOR}:{name}"


def module_of(seam: str) -> str:
    """The module that a seam is in."""
    return seam.partition(":")[0]


def _within(specifier: str, package: Package | None) -> bool | None:
    if not specifier:
        return True
    if package is None or package.release is None:
        return None
    return SpecifierSet(specifier).contains(package.release, prereleases=True)
