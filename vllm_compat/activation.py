"""Turns patches on and off: resolve every target, check every one, then commit.

State lives in one place, under one lock. On any failure nothing has changed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib._bootstrap
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
from .errors import (
    InvalidInputError,
    PatchConflictError,
    UnsupportedEnvironmentError,
    UntestedVersionWarning,
)
from .features import Features
from .imports import ImportWatch
from .record import Look, Patch, bound, module_of
from .seams import Commit, commit
from .symbols import Sources

__all__ = [
    "Entry", "Report", "applied", "apply", "current", "features", "options", "plan", "revert",
]  # fmt: skip

log = logging.getLogger("vllm_compat")

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
    """What ``apply()`` did, or what ``status()`` found. Prints as a table.

    ``report["scheduler"]`` is the entry of that patch.

    Attributes:
        environment: what is installed.
        entries: one for each patch, in the order in which they are applied.
        notes: sentences on what is out of the ordinary: a version that was not tested, a
            probe that disagrees with the version number, another library's replacement.
        workers: from ``status()``: what each worker of each live generator says of itself.
    """

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
class _State:
    # Who asked for the patches, in the order in which they did, and what each asked for.
    holders: dict[object, dict[str, Any]] = field(default_factory=dict)
    report: Report | None = None
    patches: tuple[Patch, ...] = ()
    # One for each module with seams; more if one was executed again (importlib.reload).
    commits: list[Commit] = field(default_factory=list)
    watch: ImportWatch | None = None
    # The generator's module, if it was executed under our eyes.
    watched: Any = None
    # How often the patches were taken off: whoever began under another number was overtaken.
    generation: int = 0


# Waits for an import of that module in another thread; the interpreter's own import statement
# does it with the same function.
_import_lock = importlib._bootstrap._lock_unlock_module  # type: ignore[attr-defined]

_EVERYWHERE: Any = object()  # the holder for apply(), as against a `with applied()` block
_STATE = _State()
_LOCK = threading.RLock()
_WARNED: set[str] = set()


def _in_forked_child() -> None:
    # Another thread of the parent may have held it; here that thread doesn't exist.
    global _LOCK
    _LOCK = threading.RLock()


def registry() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied."""
    # Late: the patches import the adapters, which this module must not need.
    from .patches import REGISTRY

    return REGISTRY


def options() -> Options:
    """What was asked for; where several did, the last of them who named it."""
    asked: dict[str, Any] = {
        "transport": _choice("VLLM_COMPAT_TRANSPORT", ("auto", "shared", "rpc"))
    }
    for wishes in list(_STATE.holders.values()):
        asked.update(wishes)
    return Options(**asked)


def features() -> Features:
    """What the patches that are on say of the installed vLLM and speculators."""
    return Features.of(_STATE.patches)


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
        raise InvalidInputError(
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
            gone += [
                f"{seam}, which patch {patch.name} replaces"
                for seam in patch.replaces
                if not bound(seam, sources)
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

    May be called before or after speculators is imported, from any thread and any number of
    times. Imports neither vLLM nor speculators. Switched off by ``VLLM_COMPAT_DISABLE=1``.

    Args:
        transport: how captured rows go from a worker to this process. ``shared`` is a
            memory file that has no name; ``rpc`` is vLLM's own message queue, slower;
            ``auto`` takes ``shared`` where the worker can open it. None leaves what an
            earlier call said, else ``VLLM_COMPAT_TRANSPORT``, else ``auto``.
        executor: vLLM's executor: ``mp`` (processes on this machine) or ``ray``. None leaves
            what an earlier call said, else ``mp``. Both count for generators made later.
        untested: what to do on a vLLM newer than any tested one: ``warn`` (once), ``refuse``
            or ``allow``. None reads ``VLLM_COMPAT_UNTESTED``, else ``warn``.

    Returns:
        What is on, what isn't and why.

    Raises:
        UnsupportedEnvironmentError: vLLM or speculators is missing or not one that can be
            adapted. Nothing has changed.
        PatchConflictError: something else stands where a patch has to go. Nothing has
            changed.
        InvalidInputError: an argument, or the environment variable for it, has none of the
            values above.
    """
    return _hold(_EVERYWHERE, transport, executor, untested)


def revert() -> None:
    """Puts back exactly what was there, where it is still ours.

    Undoes every :func:`apply` and every open :func:`vllm_compat.applied`. A name that
    somebody replaced after us is left alone, with a warning that names it; their
    replacement then reaches the original. Generators that were made while the patches were
    on stop working.
    """
    with _LOCK:
        _STATE.holders.clear()
        _undo()


@contextlib.contextmanager
def applied(
    *,
    transport: Literal["auto", "shared", "rpc"] | None = None,
    executor: Literal["mp", "ray"] | None = None,
    untested: Literal["warn", "refuse", "allow"] | None = None,
) -> Iterator[Report]:
    """:func:`apply` for the time of a ``with`` block.

    Blocks may be nested, overlap in several threads, and stand inside of an
    :func:`apply`: the patches come off when the last of them is left.

    Args:
        transport: as for :func:`apply`; for generators made in the block.
        executor: likewise.
        untested: as for :func:`apply`.

    Yields:
        The report of :func:`apply`.

    Raises:
        UnsupportedEnvironmentError: as :func:`apply`.
        PatchConflictError: as :func:`apply`.
    """
    holder = object()
    report = _hold(holder, transport, executor, untested)
    try:
        yield report
    finally:
        _let_go(holder)


def is_active() -> bool:
    """Whether an ``apply()`` is in force."""
    return bool(_STATE.holders)


def generation() -> int:
    """A number that changes whenever the patches are taken off."""
    return _STATE.generation


def overridden() -> list[str]:
    """A sentence for each name that somebody else has replaced over ours."""
    return [sentence for made in _STATE.commits for sentence in made.overridden()]


def current() -> Report:
    """The report of the active ``apply()``; outside of one, what it would do."""
    with _LOCK:
        report = _STATE.report
        if report is None:
            return _switched_off() if _disabled() else plan(untested="allow")
        _catch_up()
        on = any(made.module == GENERATOR for made in _STATE.commits)
        collisions = [note for made in _STATE.commits for note in made.collisions]
        return Report(
            report.environment,
            _as(report.entries, "on" if on else "waiting"),
            (*report.notes, *collisions, *overridden()),
        )


# -- on and off -------------------------------------------------------------------------


def _hold(
    holder: object, transport: str | None, executor: str | None, untested: str | None
) -> Report:
    wishes = {
        name: _one_of(name, value, allowed)
        for name, value, allowed in (
            ("transport", transport, ("auto", "shared", "rpc")),
            ("executor", executor, ("mp", "ray")),
        )
        if value is not None
    }
    if untested is not None:
        _one_of("untested", untested, ("warn", "refuse", "allow"))
    with _LOCK:
        fresh = _STATE.watch is None
        if not fresh:
            assert _STATE.report is not None
            _untested(_STATE.report.environment, untested)
        elif _disabled():
            log.warning("vllm-compat is switched off by VLLM_COMPAT_DISABLE.")
            return _switched_off()
        else:
            _switch_on(plan(untested=untested))
        _STATE.holders.setdefault(holder, {}).update(wishes)
    try:
        # An import that began before our finder was there goes past it. Not under our lock:
        # the importing thread may want that one.
        _import_lock(GENERATOR)
        with _LOCK:
            module = sys.modules.get(GENERATOR)
            if _initializing(module) and module is not _STATE.watched:
                raise PatchConflictError(
                    f"apply() was called by something that {GENERATOR} imports, while it is "
                    "being imported. Call it before that import or after it. Nothing was "
                    "changed."
                )
            report = current()
        if fresh:
            count = sum(entry.state in ("on", "waiting") for entry in report.entries)
            log.info("vllm-compat: %d patches for %s", count, report.environment)
        return report
    except BaseException:
        _let_go(holder)
        raise


def _let_go(holder: object) -> None:
    with _LOCK:
        if _STATE.holders.pop(holder, None) is not None and not _STATE.holders:
            _undo()


def _switch_on(report: Report) -> None:
    """Lets our finder see all further imports."""
    _choice("VLLM_COMPAT_TRANSPORT", ("auto", "shared", "rpc"))
    patches = tuple(e.patch for e in report.entries if e.state == "off")
    watch = ImportWatch({**_around(patches), **{m: _on_import(m) for m in _modules(patches)}})
    watch.start()
    _STATE.report, _STATE.patches, _STATE.watch = report, patches, watch
    if not _STATE.generation:
        os.register_at_fork(after_in_child=_in_forked_child)
    _STATE.generation += 1


def _undo() -> None:
    if _STATE.watch is None:
        return
    _STATE.watch.stop()
    for made in reversed(_STATE.commits):
        for sentence in made.undo():
            log.warning("vllm-compat: %s; it is left as it is.", sentence)
    _STATE.report, _STATE.patches, _STATE.watch = None, (), None
    _STATE.commits, _STATE.watched = [], None
    _STATE.generation += 1


def _disabled() -> bool:
    return os.environ.get("VLLM_COMPAT_DISABLE", "") not in ("", "0")


def _switched_off() -> Report:
    # Whatever is installed: who switches us off has no use for our opinion of it.
    reason = "VLLM_COMPAT_DISABLE is set"
    entries = tuple(Entry(patch, "off", reason) for patch in registry())
    return Report(detect(), entries, (reason,))


def _modules(patches: Sequence[Patch]) -> list[str]:
    """The modules that have seams: the generator's, and what else of speculators there is."""
    seams = (seam for patch in patches for seam in patch.replaces)
    return list(dict.fromkeys([GENERATOR, *map(module_of, seams)]))


def _on_import(name: str) -> Any:
    @contextlib.contextmanager
    def around() -> Iterator[None]:
        """Around the execution of a module with seams: the first one, and a reload."""
        module = sys.modules[name]
        again = not _initializing(module)
        with _LOCK:
            if name == GENERATOR:
                _STATE.watched = module
            for made in _STATE.commits:
                made.release(module)
        try:
            yield
        except BaseException:
            if again:  # the module is there still, with some of its names anew
                _bind(name)
            raise
        _bind(name)

    return around


def _catch_up() -> None:
    """Modules that are there, but weren't imported through our finder."""
    done = {made.module for made in _STATE.commits}
    for name in _modules(_STATE.patches):
        module = sys.modules.get(name)
        if module is not None and name not in done and not _initializing(module):
            _bind(name)


def _bind(name: str) -> None:
    with _LOCK:
        if _STATE.watch is not None:
            made = commit(_STATE.patches, name)
            _STATE.commits.append(made)
            for sentence in made.collisions:
                log.warning("vllm-compat: %s.", sentence)


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
    return _one_of(variable, os.environ.get(variable) or allowed[0], allowed)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise InvalidInputError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
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
    if policy == "warn" and sentence not in _WARNED:
        warnings.warn(
            f"{sentence}; all that the patches rely on is there, so they are applied.",
            UntestedVersionWarning,
            stacklevel=_frames_of_ours(),
        )
        _WARNED.add(sentence)
    return [sentence]


def _frames_of_ours() -> int:
    """How far up the caller is, for warnings: past this package and contextlib."""
    ours = (__name__.partition(".")[0], "contextlib")
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    return level


def import_generator() -> Any:
    """Imports the generator's module (and with it vLLM)."""
    return importlib.import_module(GENERATOR)
