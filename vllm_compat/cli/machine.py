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
from typing import Any

from .. import shm
from ..environment import Package
from ..system import Memory, memory, usable_cores
from ..transport.shared import Ring, Unavailable

__all__ = [
    "Gpu",
    "Memory",
    "Shared",
    "build_of",
    "facts",
    "gpus",
    "memory",
    "parse_gpus",
    "shared_memory",
]

_OPEN_RING = """
import json, sys
from vllm_compat.transport.shared import Offer, Unavailable, Writer
try:
    Writer(Offer(**json.loads(sys.argv[1]))).close()
except Unavailable as reason:
    sys.exit(str(reason))
"""


@dataclass(frozen=True)
class Shared:
    """How rows would go from a worker to this process.

    Attributes:
        memory: what kind of memory they share; empty if none.
        reason: why they share none; empty if they do.
    """

    memory: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi describes it; memory in bytes."""

    name: str
    total: int
    free: int
    driver: str


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


def shared_memory() -> Shared:
    """Tries what a worker does: another process opens this one's memory."""
    try:
        ring = Ring(1 << 16)
    except Unavailable as reason:
        return Shared(reason=str(reason))
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
        return Shared(reason=str(error))
    finally:
        ring.close()
    if done.returncode:
        return Shared(reason=(done.stderr.strip().splitlines() or ["?"])[-1])
    return Shared(ring.kind)


def facts() -> dict[str, Any]:
    """All of it, as plain values."""
    found, room = memory(), shm.room()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(usable_cores()),
        "memory_total": found.total,
        "memory_available": found.available,
        "shm_bytes": room.total if room else None,
        "shm_free": room.free if room else None,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus()],
    }
