"""/dev/shm, where vLLM's message queues live.

vLLM makes a file for each queue there, and takes its pages as it writes. When there is none
left, the process that writes ends with SIGBUS. Docker gives a container 64 MB.
"""

from __future__ import annotations

import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .transport.memory import SHM

__all__ = ["ADVICE", "Queues", "Room", "ended", "found", "queues", "room"]

ADVICE = "Give the container more: docker run --shm-size=1g, or --ipc=host."

_CHUNKS = 10  # of each queue (MessageQueue, max_chunks; 0.11.0 to 0.33.0)
_COMMANDS = 16  # MB of a chunk, unless VLLM_MQ_MAX_CHUNK_BYTES_MB says otherwise
_REPLIES = 24  # MB of a chunk (10 in 0.11.0)
_SOURCE = "distributed/device_communicators/shm_broadcast.py"


@dataclass(frozen=True)
class Room:
    """Bytes of /dev/shm."""

    total: int
    free: int

    def __str__(self) -> str:
        return f"{self.free >> 20} of {self.total >> 20} MB free"


@dataclass(frozen=True)
class Queues:
    """What the message queues of one engine take at most, in bytes.

    vllm/distributed/device_communicators/shm_broadcast.py (MessageQueue, ShmRingBuffer) and
    vllm/v1/executor/multiproc_executor.py (rpc_broadcast_mq, worker_response_mq), 0.11.0 to
    0.33.0. A queue has ten chunks, written in turn, so that in time each of them takes as much
    as the largest message that went through it. A message that is larger than a chunk goes
    through a socket.

    Attributes:
        commands: the one from the driver to the workers. A step's is a few hundred kB.
        replies: the one of the worker that sends rows. It fills only where rows travel with
            the replies (transport ``rpc``).
        checked: this vLLM makes a queue only if it all fits at that time (from 0.27 on).
    """

    commands: int
    replies: int
    checked: bool

    @property
    def both(self) -> int:
        return self.commands + self.replies

    @property
    def larger(self) -> int:
        return max(self.commands, self.replies)


def room() -> Room | None:
    """How much of /dev/shm there is; None where there is no such folder."""
    try:
        found = shutil.disk_usage(SHM)
    except OSError:
        return None
    return Room(found.total, found.free)


def queues(vllm: Path, chunk_mb: str | None) -> Queues:
    """What an installed vLLM needs.

    Args:
        vllm: its folder; only read.
        chunk_mb: VLLM_MQ_MAX_CHUNK_BYTES_MB.
    """
    try:
        source = (vllm / _SOURCE).read_text(encoding="utf-8")
    except OSError:
        source = ""
    default = re.search(r"max_chunk_bytes: int = 1024 \* 1024 \* (\d+)", source)
    commands = int(chunk_mb) if chunk_mb and chunk_mb.isdigit() else _COMMANDS
    replies = int(default[1]) if default else _REPLIES
    mb = _CHUNKS << 20
    return Queues(commands * mb, replies * mb, "def check_shm_free_space" in source)


def found(
    vllm: Path, chunk_mb: str | None, rpc: bool
) -> tuple[Literal["ok", "note", "problem"], str] | None:
    """Whether /dev/shm is large enough for one engine.

    Args:
        vllm: the folder of the installed vLLM.
        chunk_mb: VLLM_MQ_MAX_CHUNK_BYTES_MB.
        rpc: whether rows travel with vLLM's replies.

    Returns:
        ``problem``, ``note`` or ``ok``, and what was found; None where there is no /dev/shm.
    """
    now = room()
    if now is None:
        return None
    need = queues(vllm, chunk_mb)
    if need.checked and now.free <= need.larger:  # and a few bytes beside the chunks
        return "problem", (
            f"/dev/shm: {now}; this vLLM doesn't start unless there are {need.larger >> 20} MB "
            "for its message queue."
        )
    if rpc and now.free < need.both:
        return "problem", (
            f"/dev/shm: {now}; with the rows in them, vLLM's replies take up to "
            f"{need.both >> 20} MB there, and a worker that finds no more ends with signal 7 "
            "(SIGBUS)."
        )
    if now.free < need.both:
        return "note", (
            f"/dev/shm: {now}; enough for one engine that shares memory with this process, not "
            f"for transport 'rpc' (up to {need.both >> 20} MB), nor for NCCL on several GPUs."
        )
    return "ok", f"/dev/shm: {now}; vLLM's message queues take {need.both >> 20} MB at most."


def ended(signal_number: int) -> str:
    """How a worker ended that a signal ended, and what it means."""
    if signal_number != signal.SIGBUS:
        return f"signal {signal_number}"
    now = room()
    return (
        f"signal {signal_number} (SIGBUS: there was no memory for a page of a shared file). "
        f"Most often /dev/shm is full, where vLLM's message queues live"
        + (f" ({now} now)" if now else "")
        + f". {ADVICE.rstrip('.')}"
    )
