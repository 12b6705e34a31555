"""Facts about this machine, without making a CUDA context and without importing torch."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import Package
from ..transport.shared import Ring, Unavailable

__all__ = ["Gpu", "Memory", "build_of", "cores", "gpus", "memory", "shared_memory", "shm_bytes"]

_OPEN_RING = """
import json, sys
from vllm_compat.transport.shared import Offer, Unavailable, Writer
try:
    Writer(Offer(**json.loads(sys.argv[1]))).close()
except Unavailable as reason:
    sys.exit(str(reason))
"""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory: of the machine (or of the container, if it has less), and available."""

    total: int
    available: int


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory in bytes."""

    name: str
    total: int
    free: int
    driver: str


def memory() -> Memory:
    """What this process may use."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):  # counts the page cache, which can be had
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit - (used or 0))
    return Memory(total, available)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[Gpu]:
    """NVIDIA GPUs; empty if there are none, or no nvidia-smi to ask."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    fields = "name,memory.total,memory.free,driver_version"
    try:
        done = subprocess.run(
            [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[Gpu]:
    """Reads nvidia-smi's lines; passes over those that say ``[N/A]``."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[1].isdigit() and cells[2].isdigit():
            found.append(Gpu(cells[0], int(cells[1]) << 20, int(cells[2]) << 20, cells[3]))
    return found


def build_of(vllm: Package) -> str:
    """What a vLLM was built for: ``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``tpu``."""
    local = (vllm.version.local if vllm.version is not None else None) or ""
    for kind in ("cpu", "rocm", "xpu", "tpu"):
        if local.startswith(kind) or vllm.distribution.endswith(kind):
            return kind
    return "cuda"


def shared_memory() -> str | None:
    """Tries what a worker does: another process opens this one's memory.

    Returns:
        None if it can, else why it can't.
    """
    try:
        ring = Ring(1 << 16)
    except (Unavailable, OSError) as error:
        return str(error)
    try:
        offer = json.dumps(dataclasses.asdict(ring.offer))
        done = subprocess.run(
            [sys.executable, "-c", _OPEN_RING, offer],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            # This package may have been found by a path that only this process knows.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        ring.close()
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def shm_bytes() -> int | None:
    """Size of /dev/shm, which vLLM's own message queues live in."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def facts() -> dict[str, Any]:
    """All of it, as plain values."""
    found = memory()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": cores(),
        "memory_total": found.total,
        "memory_available": found.available,
        "shm_bytes": shm_bytes(),
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus()],
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
