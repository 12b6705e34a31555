"""Shared memory and sockets of a generator that have names: removed even if it is killed.

vLLM's executor and its workers talk through files in /dev/shm and sockets in the folder for
temporary files. When their process is killed, multiprocessing's resource tracker removes the
files; but Ray kills the whole process group of an actor that died, and an actor whose node died
kills its children before it ends: the tracker with them. The sockets nobody removes. So a
process waits for the end that is in no such group and nobody's child.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["Janitor"]

# Reads names until nobody can send any more: until this process has ended, in whatever way.
_SCRIPT = """
import os, sys
if os.fork():
    os._exit(0)
for name in sys.stdin.read().split("\\0"):
    if name:
        try:
            os.unlink(name)
        except OSError:
            pass
"""
_EVERY = 0.5  # seconds
_SHARED_MEMORY = "/dev/shm/"
# vllm.utils: get_open_zmq_ipc_path(), a uuid4 in VLLM_RPC_BASE_PATH.
_SOCKET = re.compile(r".*/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Janitor:
    """Removes what a generator leaves behind. To be made before the generator is.

    Args:
        alone: nothing else goes on in this process, as in an actor: whatever appears in it is
            the generator's, and goes even if it is killed while the generator is made.
    """

    def __init__(self, alone: bool = False) -> None:
        self._known = _named_files(os.getpid())
        self._process: subprocess.Popen[bytes] | None = None
        self._made = threading.Event()
        with contextlib.suppress(OSError):  # no process to be had: as without it
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # says nothing; its end is the end of the work
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._process.wait()
        self._looking = threading.Thread(target=self._look, daemon=True)
        if alone:
            self._looking.start()

    def watch(self, workers: Iterable[int]) -> None:
        """From now on, what was made since then goes when this process ends.

        Args:
            workers: ids of the generator's processes. All of its files are theirs too; what
                else this process has is somebody else's.
        """
        self._stop_looking()
        names = {name for name in _named_files(os.getpid()) if _SOCKET.fullmatch(name)}
        for worker in workers:
            names |= _named_files(worker)
        self._tell(names)

    def clean(self) -> None:
        """Removes it now: the generator has been shut down, or could not be made."""
        self._stop_looking()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                process.communicate(timeout=10)

    def _look(self) -> None:
        while not self._made.wait(_EVERY):
            for process in [os.getpid(), *_children()]:
                self._tell(_named_files(process))

    def _stop_looking(self) -> None:
        self._made.set()
        if self._looking.is_alive():
            self._looking.join()

    def _tell(self, names: set[str]) -> None:
        names -= self._known
        if self._process is None or self._process.stdin is None:
            return
        self._known |= names
        with contextlib.suppress(OSError):
            for name in sorted(names):
                self._process.stdin.write(name.encode(errors="surrogateescape") + b"\0")
            self._process.stdin.flush()


def _children() -> Iterator[int]:
    with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN
        for thread in os.listdir("/proc/self/task"):
            yield from map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())


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
