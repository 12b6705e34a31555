"""Ends a worker whose driver is gone.

vLLM's worker notices it by a pipe whose other end the driver has. A process that the driver
forked since has that end too: as long as it lives, the worker would, and keep its GPU. A worker
in the middle of a collective doesn't look at the pipe at all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

__all__ = ["end_with_driver"]

_LOOK = 1.0  # seconds between two looks
_GRACE = 3.0  # seconds for each way to end that is gentler than the next


def end_with_driver() -> None:
    """Starts a thread that ends this process once the one that started it is gone.

    Does nothing in a process that multiprocessing did not start (Ray's actors): its parent
    is not the driver.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        threading.Thread(
            target=_watch, args=(parent.pid,), name="vllm-compat-driver", daemon=True
        ).start()


def _watch(driver: int) -> None:
    # Not PR_SET_PDEATHSIG: it fires when the driver's thread ends that made this process.
    while os.getppid() == driver:
        time.sleep(_LOOK)
    time.sleep(_GRACE)  # vLLM may notice it by itself
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)
