"""What this process may use of the machine: cores and memory, as far as the system says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Memory", "memory", "usable_cores"]

_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: of the machine (or of the container, if it has less), and available."""

    total: int
    available: int


def memory() -> Memory:
    """What this process may use."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    found = _table(Path("/proc/meminfo"))
    if "MemAvailable" in found:  # counts the page cache, which can be had
        available = found["MemAvailable"] * 1024
    for limit, used in _limits():
        if limit < total:
            total, available = limit, min(available, max(0, limit - used))
    return Memory(total, available)


def _limits() -> Iterator[tuple[int, int]]:
    """Of this process's control group and those that it is in: the limit, and bytes in use.

    Without the page cache, which the group gives back. A batch system sets the limit of a job
    in a group of its own; a container sees its group as the root.
    """
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = _GROUPS, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):  # version 1
            root = _GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            limit, used = (_number(folder / name) for name in names)
            if limit is not None and used is not None:
                stat = _table(folder / "memory.stat")
                # In version 1, total_ counts the groups inside of it, as the use does.
                cached = sum(
                    stat.get(f"total_{name}", stat.get(name, 0))
                    for name in ("inactive_file", "active_file")
                )
                yield limit, max(0, used - cached)
            if folder == root:
                break


def usable_cores() -> list[int]:
    """Cores that this process may run on, in order; all, where the system doesn't say."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system; a sandbox may refuse it
        return list(range(os.cpu_count() or 1))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.replace(":", " ").split() for line in _lines(path))
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}
