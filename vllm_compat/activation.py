"""Turns patches on and off: resolve every target, check every one, then commit.

State lives in one place, under one lock. On any failure nothing has changed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import tested
from .environment import GENERATOR, Environment, detect, require
from .errors import PatchConflictError, UnsupportedEnvironmentError, UntestedVersionWarning
from .imports import ImportWatch
from .record import Look, Patch
from .symbols import Sources

__all__ = ["Entry", "Report", "apply", "current", "options", "plan", "revert"]

log = logging.getLogger("vllm_compat")

_ABSENT: Any = object()

State = Literal["on", "waiting", "not needed", "skipped", "off"]


@dataclass(frozen=True)
class Entry:
    """One patch in a report.

    Attributes:
        patch: the record.
        state: ``on``; ``waiting`` (on as soon as speculators is imported);
            ``not needed`` here; ``skipped`` by ``VLLM_COMPAT_SKIP``; ``off``.
        reason: one clause.
    """

    patch: Patch
    state: State
    reason: str


@dataclass(frozen=True)
class Report:
    """What ``apply()`` did, or what ``status()`` found. Prints as a table."""

    environment: Environment
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()
    workers: tuple[dict[str, Any], ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is on, or will be when speculators is imported."""
        return any(e.state in ("on", "waiting") for e in self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.patch.name == name:
                return entry
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [str(self.environment)]
        width = max((len(e.patch.name) for e in self.entries), default=0)
        lines += [f"  {e.patch.name:<{width}}  {e.state:<10}  {e.reason}" for e in self.entries]
        lines += [f"  note: {note}" for note in self.notes]
        for worker in self.workers:
            shown = ", ".join(f"{key}={value}" for key, value in worker.items())
            lines.append(f"  worker: {shown}")
        return "\n".join(lines)


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


@dataclass
class _Replaced:
    owner: Any
    attribute: str
    original: Any
    own: bool
    ours: Any


@dataclass
class _State:
    depth: int = 0
    entries: tuple[Entry, ...] = ()
    environment: Environment | None = None
    notes: tuple[str, ...] = ()
    replaced: list[_Replaced] = field(default_factory=list)
    watch: ImportWatch | None = None
    options: Options = field(default_factory=Options)


_LOCK = threading.RLock()
_STATE = _State()


def registry() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied."""
    # Late: the patches import the adapters, which this module must not need.
    from .patches import REGISTRY

    return REGISTRY


def options() -> Options:
    """The options of the active ``apply()``, or the defaults."""
    return _STATE.options


def plan(sources: Sources | None = None, untested: str | None = None) -> Report:
    """Decides for each patch, from files alone; changes and imports nothing.

    Args:
        sources: where to look; by default what Python would import.
        untested: what to do on a vLLM newer than any tested: ``warn``, ``refuse``,
            ``allow``; None takes ``VLLM_COMPAT_UNTESTED``, else ``warn``.

    Raises:
        UnsupportedEnvironmentError: in one sentence.
    """
    sources = sources or Sources()
    environment = detect(sources)
    vllm, _ = require(environment, sources)
    look = Look(environment, sources)
    skip = {s.strip() for s in os.environ.get("VLLM_COMPAT_SKIP", "").split(",") if s.strip()}
    unknown = skip - {p.name for p in registry()}
    if unknown:
        raise UnsupportedEnvironmentError(
            f"VLLM_COMPAT_SKIP names no patch of ours: {', '.join(sorted(unknown))}."
        )

    entries: list[Entry] = []
    notes: list[str] = []
    gone: list[str] = []
    for patch in registry():
        expected = patch.expected(environment)
        needed = patch.needed(look)
        if needed and expected is False:
            notes.append(f"{patch.name}: needed here, though not by the version number")
        elif expected and not needed:
            notes.append(f"{patch.name}: not needed here, though the version number says so")
        if not needed:
            entries.append(Entry(patch, "not needed", "what is installed has no such fault"))
        elif patch.name in skip:
            entries.append(Entry(patch, "skipped", "VLLM_COMPAT_SKIP"))
        else:
            entries.append(Entry(patch, "off", patch.why))
            gone += [
                f"{symbol.path}{_with(symbol.parameters)} (patch {patch.name}"
                + (f": {symbol.if_gone})" if symbol.if_gone else ")")
                for symbol in patch.required_symbols(environment)
                if not look.accepts(symbol.path, *symbol.parameters)
            ]
    provided = {name for e in entries if e.state == "off" for name in e.patch.provides}
    gone += [
        f"{name} (imported by speculators' generator itself)"
        for name in sources.unresolved(GENERATOR, "vllm")
        if name not in provided
    ]
    if gone:
        raise UnsupportedEnvironmentError(
            f"{vllm} is not as this version of vllm-compat knows it: missing "
            f"{'; '.join(gone)}. Nothing was changed. Newest vLLM tested: "
            f"{tested.newest('vllm') or 'none'}; install that, or a newer vllm-compat."
        )
    notes += _untested(environment, untested)
    return Report(environment, tuple(entries), tuple(notes))


def apply(
    *,
    transport: Literal["auto", "shared", "rpc"] | None = None,
    executor: Literal["mp", "ray"] | None = None,
    untested: Literal["warn", "refuse", "allow"] | None = None,
) -> Report:
    """Makes the generator of the installed speculators run on the installed vLLM.

    May be called before or after speculators is imported, and any number of times; the
    first call decides, later ones return the same report. Imports neither vLLM nor
    speculators.

    Args:
        transport: how captured rows go from a worker to this process. ``shared`` is a
            memory file that has no name; ``rpc`` is vLLM's own message queue, slower;
            ``auto`` takes ``shared`` where the worker can open it.
        executor: vLLM's executor: ``mp`` (processes on this machine) or ``ray``.
        untested: what to do on a vLLM newer than any tested one: ``warn`` (once), ``refuse``
            or ``allow``. None reads ``VLLM_COMPAT_UNTESTED``, else ``warn``.

    Returns:
        What is on, what isn't and why.

    Raises:
        UnsupportedEnvironmentError: vLLM or speculators is missing or not one that can be
            adapted. Nothing has changed.
        PatchConflictError: something else stands where a patch has to go. Nothing has
            changed.
    """
    with _LOCK:
        if os.environ.get("VLLM_COMPAT_DISABLE", "") not in ("", "0"):
            report = plan(untested="allow")
            log.warning("vllm-compat is switched off by VLLM_COMPAT_DISABLE.")
            return Report(report.environment, report.entries, ("VLLM_COMPAT_DISABLE is set",))
        if _STATE.depth:
            _STATE.depth += 1
            return current()
        report = plan(untested=untested)
        _STATE.options = Options(
            transport=transport or _choice("VLLM_COMPAT_TRANSPORT", ("auto", "shared", "rpc")),
            executor=executor or "mp",
        )
        patches = [e.patch for e in report.entries if e.state == "off"]
        loaded = sys.modules.get(GENERATOR)
        try:
            if loaded is not None and not _initializing(loaded):
                _commit(patches)
                _STATE.entries = _as(report.entries, "on")
            else:
                _STATE.watch = ImportWatch(
                    {**_around(patches), GENERATOR: functools.partial(_on_import, patches)}
                )
                _STATE.watch.start()
                _STATE.entries = _as(report.entries, "waiting")
        except BaseException:
            _undo()
            raise
        _STATE.depth = 1
        _STATE.environment, _STATE.notes = report.environment, report.notes
        count = sum(e.state in ("on", "waiting") for e in _STATE.entries)
        log.info("vllm-compat: %d patches for %s", count, report.environment)
        return current()


def revert(*, all: bool = True) -> None:
    """Puts back exactly what was there, where it is still ours.

    A name that somebody replaced after us is left alone, with a warning that names it.
    Generators that were made while the patches were on stop working.

    Args:
        all: undo every ``apply()``; False undoes one of them, as leaving
            :func:`vllm_compat.applied` does.
    """
    with _LOCK:
        if not _STATE.depth:
            return
        _STATE.depth = 0 if all else _STATE.depth - 1
        if not _STATE.depth:
            _undo()


def is_active() -> bool:
    """Whether an ``apply()`` is in force."""
    return _STATE.depth > 0


def current() -> Report:
    """The report of the active ``apply()``; outside of one, what it would do."""
    with _LOCK:
        if not _STATE.depth or _STATE.environment is None:
            return plan(untested="allow")
        return Report(_STATE.environment, _STATE.entries, _STATE.notes)


# -- committing -------------------------------------------------------------------------


def _commit(patches: Sequence[Patch]) -> None:
    """Builds every replacement first, then binds them all."""
    chains: dict[str, list[Patch]] = {}
    for patch in patches:
        for seam in patch.replaces:
            chains.setdefault(seam, []).append(patch)
    ready: list[_Replaced] = []
    for seam, chain in chains.items():
        owner, attribute, original, own = _locate(seam, chain[0])
        value = original if own or original is not _ABSENT else getattr(builtins, attribute)
        for patch in chain:
            value = patch.replaces[seam](value)
        ready.append(_Replaced(owner, attribute, original, own, value))
    for item in ready:
        setattr(item.owner, item.attribute, item.ours)
        _STATE.replaced.append(item)


def _locate(seam: str, patch: Patch) -> tuple[Any, str, Any, bool]:
    module_name, _, path = seam.partition(":")
    owner: Any = sys.modules[module_name]
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            raise PatchConflictError(
                f"{seam} (patch {patch.name}) is not there: {parent} is missing from "
                f"{module_name}. Nothing was changed."
            )
    own = attribute in vars(owner)
    original = getattr(owner, attribute, _ABSENT)
    if original is _ABSENT and not hasattr(builtins, attribute):
        raise PatchConflictError(
            f"{seam} (patch {patch.name}) is not there. Nothing was changed."
        )
    if own and isinstance(owner, type):
        original = vars(owner)[attribute]
    if getattr(original, "__vllm_compat__", False):
        raise PatchConflictError(
            f"{seam} (patch {patch.name}) already carries a replacement by another copy of "
            "vllm-compat. Nothing was changed."
        )
    return owner, attribute, original, own


def _undo() -> None:
    if _STATE.watch is not None:
        _STATE.watch.stop()
        _STATE.watch = None
    for item in reversed(_STATE.replaced):
        now = vars(item.owner).get(item.attribute, _ABSENT)
        if now is not item.ours:
            log.warning(
                "vllm-compat: %s.%s was replaced by %r after us and is left as it is.",
                getattr(item.owner, "__name__", item.owner),
                item.attribute,
                getattr(now, "__module__", None) or now,
            )
        elif item.own:
            setattr(item.owner, item.attribute, item.original)
        else:
            delattr(item.owner, item.attribute)
    _STATE.replaced.clear()
    _STATE.entries, _STATE.notes, _STATE.environment = (), (), None
    _STATE.options = Options()


@contextlib.contextmanager
def _on_import(patches: Sequence[Patch]) -> Iterator[None]:
    yield
    with _LOCK:
        if _STATE.depth and not _STATE.replaced:
            _commit(patches)
            _STATE.entries = _as(_STATE.entries, "on")


def _around(patches: Sequence[Patch]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for patch in patches:
        for module, factory in patch.around_import.items():
            if module not in sys.modules:
                found[module] = _both(found[module], factory) if module in found else factory
    return found


def _both(first: Any, second: Any) -> Any:
    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with first(), second():
            yield

    return entered


def _initializing(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _as(entries: Sequence[Entry], state: State) -> tuple[Entry, ...]:
    return tuple(
        Entry(e.patch, state, e.reason) if e.state in ("off", "waiting", "on") else e
        for e in entries
    )


def _with(parameters: tuple[str, ...]) -> str:
    return f"({', '.join(parameters)})" if parameters else ""


def _choice(variable: str, allowed: tuple[str, ...]) -> Any:
    value = os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise UnsupportedEnvironmentError(
            f"{variable}={value!r} is not one of {', '.join(allowed)}."
        )
    return value


def _untested(environment: Environment, policy: str | None) -> list[str]:
    policy = policy or _choice("VLLM_COMPAT_UNTESTED", ("warn", "refuse", "allow"))
    newest = tested.newest("vllm")
    vllm = environment.vllm
    if vllm is None or newest is None or vllm.release is None or vllm.release <= newest:
        return []
    sentence = (
        f"{vllm} is newer than any vLLM that vllm-compat was tested with (newest: {newest})"
    )
    if policy == "refuse":
        raise UnsupportedEnvironmentError(f"{sentence}, and untested versions are refused.")
    if policy == "warn":
        warnings.warn(
            f"{sentence}; all that the patches rely on is there, so they are applied.",
            UntestedVersionWarning,
            stacklevel=4,
        )
    return [sentence]


def import_generator() -> Any:
    """Imports the generator's module (and with it vLLM)."""
    return importlib.import_module(GENERATOR)
