"""Turns patches on and off: resolve every target, check every one, then commit.

What is on is kept in :mod:`vllm_compat.state`, and changed here under one lock. On any failure
nothing has changed.
"""

from __future__ import annotations

import contextlib
import importlib._bootstrap
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from .decision import Decision, check_tested, decide
from .environment import GENERATOR
from .errors import PatchConflictError
from .imports import ImportWatch
from .record import Patch, module_of
from .report import Entry, Report, State
from .seams import commit
from .settings import CHOICES, Settings, Untested, one_of
from .state import STATE as _STATE
from .state import is_active, options, overridden

__all__ = ["applied", "apply", "current", "is_active", "options", "revert"]

log = logging.getLogger("vllm_compat")

# Waits for an import of that module in another thread; the interpreter's own import statement
# does it with the same function.
_import_lock = importlib._bootstrap._lock_unlock_module  # type: ignore[attr-defined]

_EVERYWHERE: Any = object()  # the holder for apply(), as against a `with applied()` block
_LOCK = threading.RLock()


def _in_forked_child() -> None:
    # Another thread of the parent may have held it; here that thread doesn't exist.
    global _LOCK
    _LOCK = threading.RLock()


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
        InvalidInputError: an argument, or one of our environment variables, has none of the
            values above, or VLLM_COMPAT_SKIP names no patch.
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


def current() -> Report:
    """The report of the active ``apply()``; outside of one, what it would do.

    Raises:
        UnsupportedEnvironmentError: as ``apply()`` would.
        InvalidInputError: likewise.
    """
    with _LOCK:
        report = _STATE.report
        if report is None:
            return decide(warn=False).report
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
    holder: object, transport: str | None, executor: str | None, untested: Untested | None
) -> Report:
    asked = {"transport": transport, "executor": executor, "untested": untested}
    wishes = {
        name: one_of(name, value, CHOICES[name])
        for name, value in asked.items()
        if value is not None
    }
    wishes.pop("untested", None)
    with _LOCK:
        fresh = _STATE.watch is None
        if fresh:
            decision = decide(untested)
            if decision.settings.disable:
                log.warning("vllm-compat is switched off by VLLM_COMPAT_DISABLE.")
                return decision.report
            _switch_on(decision)
        else:
            assert _STATE.report is not None
            check_tested(_STATE.report.environment, untested or Settings.read().untested)
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


def _switch_on(decision: Decision) -> None:
    """Lets our finder see all further imports."""
    patches = decision.patches
    watch = ImportWatch({**_around(patches), **{m: _on_import(m) for m in _modules(patches)}})
    watch.start()
    _STATE.report, _STATE.patches, _STATE.watch = decision.report, patches, watch
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
            if again:  # the module is there still, with some of its names new
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
