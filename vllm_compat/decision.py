"""What ``apply()`` does here: the one place that decides it."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, replace

from . import tested
from .environment import Environment, detect
from .errors import UnsupportedEnvironmentError, UntestedVersionWarning
from .inspection import inspect, registry
from .record import Patch
from .report import Entry, Report
from .settings import Settings, Untested
from .symbols import Sources

__all__ = ["Decision", "check_tested", "decide", "plan"]

_WARNED: set[str] = set()


@dataclass(frozen=True)
class Decision:
    """What ``apply()`` would do here.

    Attributes:
        settings: what the environment variables say.
        report: what ``apply()`` would return, but that patches which it would put on are
            ``off``.
        patches: those that it would put on; none if it is switched off.
    """

    settings: Settings
    report: Report
    patches: tuple[Patch, ...] = ()


def decide(untested: Untested | None = None, *, warn: bool = True) -> Decision:
    """Decides what ``apply()`` does; changes and imports nothing.

    ``apply()`` begins with it; ``status()`` and ``doctor`` say what it says. What only the
    import of the generator shows, another library's replacement, is found later.

    Args:
        untested: as for :func:`apply`.
        warn: whether to warn of a vLLM newer than any tested one.

    Raises:
        UnsupportedEnvironmentError: as :func:`apply`.
        InvalidInputError: one of our environment variables has a wrong value.
    """
    settings = Settings.read({patch.name for patch in registry()})
    if settings.disable:
        # Whatever is installed: who switches us off has no use for our opinion of it.
        reason = "VLLM_COMPAT_DISABLE is set"
        entries = tuple(Entry(patch, "off", reason) for patch in registry())
        return Decision(settings, Report(detect(), entries, (reason,)))
    if untested is not None:
        settings = replace(settings, untested=untested)
    if settings.untested == "warn" and not warn:
        settings = replace(settings, untested="allow")
    report = plan(settings=settings)
    return Decision(
        settings, report, tuple(e.patch for e in report.entries if e.state == "off")
    )


def plan(sources: Sources | None = None, settings: Settings | None = None) -> Report:
    """Decides for each patch, from files alone; changes and imports nothing.

    Args:
        sources: where to look; by default what Python would import.
        settings: by default those of the environment variables.

    Raises:
        UnsupportedEnvironmentError: something is missing, or not tested and to be refused.
    """
    settings = settings or Settings.read({patch.name for patch in registry()})
    found = inspect(sources or Sources(), registry(), settings.skip)
    found.check()
    untested = check_tested(found.environment, settings.untested)
    notes = (*found.notes, *([untested] if untested else []))
    return Report(found.environment, found.entries, notes)


def check_tested(environment: Environment, policy: str) -> str:
    """Follows a policy on a vLLM that is newer than any tested one.

    Args:
        environment: what is installed.
        policy: ``warn`` (once in a process), ``refuse`` or ``allow``.

    Returns:
        A sentence that says so; empty if this vLLM is not newer.

    Raises:
        UnsupportedEnvironmentError: it is, and the policy is ``refuse``.
    """
    newest = tested.newest("vllm")
    vllm = environment.vllm
    if vllm is None or newest is None or vllm.release is None or vllm.release <= newest:
        return ""
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
    return sentence


def _frames_of_ours() -> int:
    """How far up the caller is, for warnings: past this package and contextlib."""
    ours = (__name__.partition(".")[0], "contextlib")
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ours:
        level, frame = level + 1, frame.f_back
    return level
