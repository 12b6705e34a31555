"""Compares what is installed with what the patches say of it, from files alone.

One function finds what is missing. ``apply()`` refuses with it, ``drift`` and ``doctor`` print
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from . import tested
from .environment import GENERATOR, Environment, detect, require
from .errors import UnsupportedEnvironmentError
from .record import Look, Patch, bound
from .report import Entry
from .symbols import Sources, Symbol

__all__ = ["Deviation", "Inspection", "Kind", "inspect", "registry"]

Kind = Literal["gone", "parameters", "range", "seam", "import", "environment"]


@dataclass(frozen=True)
class Deviation:
    """One thing that is not as a patch knows it.

    Attributes:
        kind: ``gone`` (a symbol is missing), ``parameters`` (a callable lost some),
            ``range`` (probe and version range of a record disagree), ``seam`` (a name that
            a patch replaces is not bound there any more), ``import`` (the generator imports
            it, and it is gone), ``environment`` (no vLLM, or no generator, at all).
        patch: name of the patch, or empty.
        symbol: what it is about; ``module:Name.member``.
        what: one clause that says what is different.
        seen: what a user would see, one clause; may be empty.
        missing: how ``apply()`` names it when it refuses; empty if it doesn't refuse.
    """

    kind: Kind
    patch: str
    symbol: str
    what: str
    seen: str = ""
    missing: str = ""

    def __str__(self) -> str:
        where = f" (patch {self.patch})" if self.patch else ""
        seen = f"; users would see: {self.seen}" if self.seen else ""
        return f"{self.symbol}{where}: {self.what}{seen}"


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found.

    Attributes:
        environment: what is installed.
        entries: one for each patch: ``not needed``, ``skipped``, or ``off``: to be put on.
            Empty if there is no vLLM or no generator.
        deviations: what is not as the patches know it.
    """

    environment: Environment
    entries: tuple[Entry, ...]
    deviations: tuple[Deviation, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each patch whose probe and version range disagree."""
        return tuple(f"{d.patch}: {d.what}" for d in self.deviations if d.kind == "range")

    def check(self) -> None:
        """Refuses an environment in which something is missing.

        Raises:
            UnsupportedEnvironmentError: one message that names all of it.
        """
        for deviation in self.deviations:
            if deviation.kind == "environment":
                raise UnsupportedEnvironmentError(deviation.missing)
        if missing := [d.missing for d in self.deviations if d.missing]:
            raise UnsupportedEnvironmentError(
                f"{self.environment.vllm} is not as this version of vllm-compat knows it: "
                f"missing {'; '.join(missing)}. Nothing was changed. Newest vLLM tested: "
                f"{tested.newest('vllm') or 'none'}; install that, or a newer vllm-compat."
            )


def registry() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied."""
    # `import vllm_compat` needs none of them, and they take a quarter of its time again.
    from .patches import REGISTRY

    return REGISTRY


def inspect(
    sources: Sources, patches: Sequence[Patch], skip: Collection[str] = ()
) -> Inspection:
    """Decides for each patch whether it is needed, and looks for all that it relies on.

    Args:
        sources: where vLLM, speculators and transformers are read. None of it is imported.
        patches: the records.
        skip: names of patches that are not to be put on, and need nothing therefore.
    """
    environment = detect(sources)
    try:
        require(environment, sources)
    except UnsupportedEnvironmentError as error:
        nothing = Deviation("environment", "", "", str(error), missing=str(error))
        return Inspection(environment, (), (nothing,))
    look = Look(environment, sources)
    entries = tuple(_entry(patch, look, skip) for patch in patches)
    deviations: list[Deviation] = []
    provided: set[str] = set()
    for entry in entries:
        deviations += _range(entry, environment)
        if entry.state == "off":
            provided.update(entry.patch.provides)
            deviations += _missing(entry.patch, look)
    deviations += [
        Deviation(
            "import",
            "",
            name,
            "is imported by the generator, and gone",
            "UnsupportedEnvironmentError from apply()",
            f"{name} (imported by speculators' generator itself)",
        )
        for name in sources.unresolved(GENERATOR, "vllm")
        if name not in provided
    ]
    return Inspection(environment, entries, tuple(deviations))


def _entry(patch: Patch, look: Look, skip: Collection[str]) -> Entry:
    if not patch.needed(look):
        return Entry(patch, "not needed", "what is installed has no such fault")
    if patch.name in skip:
        return Entry(patch, "skipped", "VLLM_COMPAT_SKIP")
    return Entry(patch, "off", patch.why)


def _range(entry: Entry, environment: Environment) -> Iterator[Deviation]:
    patch, needed = entry.patch, entry.state != "not needed"
    expected = patch.expected(environment)
    if expected is None or expected == needed:
        return
    ranges = "; ".join(
        f"{name} {specifier}"
        for name in ("vllm", "speculators", "transformers")
        if (specifier := getattr(patch, name))
    )
    what = (
        "needed here, though not by the version number"
        if needed
        else "not needed here, though the version number says so"
    )
    yield Deviation("range", patch.name, patch.upstream, f"{what} (its record: {ranges})")


def _missing(patch: Patch, look: Look) -> Iterator[Deviation]:
    for symbol in patch.required_symbols(look.environment):
        if (deviation := _compare(patch, symbol, look.sources)) is not None:
            yield deviation
    for seam in patch.replaces:
        if not bound(seam, look.sources):
            yield Deviation(
                "seam",
                patch.name,
                seam,
                "is not bound there",
                patch.why,
                f"{seam}, which patch {patch.name} replaces",
            )


def _compare(patch: Patch, symbol: Symbol, sources: Sources) -> Deviation | None:
    found = sources.find(symbol.path)
    if found is not None and found.accepts(*symbol.parameters):
        return None
    seen = symbol.if_gone or f"UnsupportedEnvironmentError from apply(), for: {patch.why}"
    wanted = f"({', '.join(symbol.parameters)})" if symbol.parameters else ""
    consequence = f": {symbol.if_gone}" if symbol.if_gone else ""
    missing = f"{symbol.path}{wanted} (patch {patch.name}{consequence})"
    if found is None:
        return Deviation("gone", patch.name, symbol.path, "is gone", seen, missing)
    lost = [name for name in symbol.parameters if not found.accepts(name)]
    what = f"no longer takes {', '.join(lost)}; takes {', '.join(found.parameters) or '-'}"
    return Deviation("parameters", patch.name, symbol.path, what, seen, missing)
