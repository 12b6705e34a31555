"""What ``apply()`` and ``status()`` return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .environment import Environment
from .record import Patch

__all__ = ["Entry", "Report", "State"]

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
