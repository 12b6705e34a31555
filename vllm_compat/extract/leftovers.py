"""Shared memory and sockets of a generator that have names: removed even if it is killed.

vLLM's executor and its workers talk through files in /dev/shm and sockets in the folder for
temporary files. When their process is killed, multiprocessing's resource tracker removes the
files; but Ray kills the whole process group of an actor that died, the tracker with it. The
sockets nobody removes. So a process outside of the group waits for the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Janitor"]

# Reads names until nobody can send any more: until this process has ended, in whatever way.
_SCRIPT = """
import os, sys
for name in sys.stdin.read().split("\\0"):
    if name:
        try:
            os.unlink(name)
        except OSError:
            pass
"""
_SHARED_MEMORY = "/dev/shm/"
# vllm.utils: get_open_zmq_ipc_path(), a uuid4 in VLLM_RPC_BASE_PATH.
_SOCKET = re.compile(r".*/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Janitor:
    """Removes what a generator leaves behind. To be made before the generator is."""

    def __init__(self) -> None:
        self._before = _named_files(os.getpid())
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, workers: Iterable[int]) -> None:
        """From now on, what was made since then goes when this process ends.

        Args:
            workers: ids of the generator's processes. All of its files are theirs too; what
                else this process has is somebody else's.
        """
        names = {name for name in _named_files(os.getpid()) if _SOCKET.fullmatch(name)}
        for worker in workers:
            names |= _named_files(worker)
        names -= self._before
        if not names:
            return
        with contextlib.suppress(OSError):  # no process to be had: as without it
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write("\0".join(sorted(names)).encode(errors="surrogateescape"))
            self._process.stdin.flush()

    def clean(self) -> None:
        """Removes it now: the generator has been shut down."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=10)


def _named_files(process: int) -> set[str]:
    """Shared memory that a process has mapped, and its sockets, if they have names."""
    sockets = {}
    names = set()
    with contextlib.suppress(OSError):  # it may just have ended
        for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines():
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[7].startswith("/"):
                sockets[f"socket:[{fields[6]}]"] = fields[7]
        maps = Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")
        for line in maps.splitlines():
            _, found, name = line.partition(_SHARED_MEMORY)
            if found and not name.endswith("(deleted)"):
                names.add(_SHARED_MEMORY + name)
        for entry in os.scandir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(entry.path)
                if target in sockets:
                    names.add(sockets[target])
    return names
