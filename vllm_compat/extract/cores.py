"""Which CPU cores a replica takes.

Replicas on one machine know nothing of each other: Ray counts cores, but doesn't say which.
Each core has a file; whoever holds the lock on it has the core. The kernel gives a lock back
when its owner dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

from ..system import usable_cores

__all__ = ["Cores"]

_WAIT = 5.0  # seconds for a replica that died to be gone


class Cores:
    """Cores that nobody else of this user's replicas has.

    Args:
        count: how many.
        wait: seconds to wait for them.

    Attributes:
        ids: the cores; empty if there weren't as many free.
    """

    def __init__(self, count: int, wait: float = _WAIT) -> None:
        self._fds: list[int] = []
        self.ids: list[int] = []
        deadline = time.monotonic() + wait
        while not self._claim(count) and time.monotonic() < deadline:
            time.sleep(0.2)

    def _claim(self, count: int) -> bool:
        allowed = usable_cores()
        if len(allowed) < count:
            return True  # there never will be enough
        try:
            return self._lock(allowed, count)
        except OSError:  # no such folder can be made, or no locks there: share the cores
            self.release()
            return True

    def _lock(self, allowed: list[int], count: int) -> bool:
        folder = Path(tempfile.gettempdir()) / f"vllm-compat-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        for core in allowed:
            fd = os.open(folder / str(core), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    continue
                raise
            self._fds.append(fd)
            self.ids.append(core)
            if len(self.ids) == count:
                return True
        self.release()
        return False

    def release(self) -> None:
        """Gives them back."""
        for fd in self._fds:
            os.close(fd)
        self._fds, self.ids = [], []
