"""Memory for results: in huge pages, and used again once a result is gone.

A batch of states is hundreds of megabytes, and a script saves one and drops it. From malloc
each batch would be mapped, faulted in page by page and unmapped again: on an H200's host that
took as long as a third of the prefill itself. Here the memory of a dropped result goes to the
next one. A result that is kept keeps its memory, and it alone: blocks are never shared.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy
import torch

from .errors import CaptureError
from .system import usable_cores

__all__ = ["Arena", "Copier"]

_SMALL = 1 << 20  # bytes; below, malloc is as good
_HUGE = 2 << 20


class Arena:
    """Makes tensors whose memory comes back when they are gone.

    It keeps as much as the largest batch took, and no more; the rest goes to the system.
    """

    def __init__(self) -> None:
        self._limit = 0
        self._closed = False
        self._free: list[tuple[int, mmap.mmap]] = []  # by size
        self._kept = 0
        # Re-entrant: a tensor may be collected while this thread holds the lock.
        self._lock = threading.RLock()
        _ARENAS.add(self)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised, contiguous CPU tensor with memory of its own.

        Raises:
            CaptureError: this process may not have so much memory (``ulimit -v``).
        """
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(nbytes) or self._new(-(-nbytes // _HUGE) * _HUGE)
        array = numpy.frombuffer(block, dtype=numpy.uint8, count=nbytes)
        # torch's storage holds the array, so the array goes when the last tensor on this
        # storage does, whatever view of it was kept.
        weakref.finalize(array, self._give, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def expect(self, nbytes: int) -> None:
        """A batch of this size is about to be allocated."""
        with self._lock:
            if not self._closed:
                self._limit = max(self._limit, nbytes)

    def close(self) -> None:
        """Lets go of what is kept; tensors that are in use are not touched."""
        with self._lock:
            self._closed, self._limit = True, 0
            self._free.clear()
            self._kept = 0

    def _new(self, size: int) -> mmap.mmap:
        try:
            return _mapped(size)
        except OSError:
            pass
        # What is kept for later batches, and what is waiting to be collected, may be enough.
        with self._lock:
            self._free.clear()
            self._kept = 0
        gc.collect()
        try:
            return _mapped(size)
        except OSError as error:
            raise CaptureError(
                f"There is no memory for the result ({size} bytes for one sequence and layer: "
                f"{error.strerror}). Pass fewer sequences at a time, or keep fewer results."
            ) from error

    def _take(self, nbytes: int) -> mmap.mmap | None:
        """The smallest block that is kept and large enough, if it isn't far too large."""
        with self._lock:
            place = bisect.bisect_left(self._free, nbytes, key=lambda kept: kept[0])
            if place == len(self._free) or self._free[place][0] > 2 * nbytes:
                return None
            size, block = self._free.pop(place)
            self._kept -= size
            return block

    def _give(self, block: mmap.mmap) -> None:
        size = len(block)
        with self._lock:
            if self._kept + size <= self._limit:
                self._kept += size
                bisect.insort(self._free, (size, block), key=lambda kept: kept[0])


def _mapped(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Advice: a kernel without huge pages says EINVAL, and pages are small.
    with contextlib.suppress(AttributeError, OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


_ARENAS: weakref.WeakSet[Arena] = weakref.WeakSet()


def _let_go() -> None:
    for arena in list(_ARENAS):
        arena._lock = threading.RLock()  # another thread of the parent may have held it
        arena.close()


# What a child keeps of it is memory twice as soon as this process writes there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Copier:
    """Copies rows with a few threads: one alone moves 1 to 5 GB/s, less than a GPU makes.

    torch's own threads would do, but how many a copy gets depends on the thread that asks
    and on what the user has set for training; and after each copy they spin for the next one,
    on the cores that the workers of a CPU want.
    """

    def __init__(self) -> None:
        self._width = max(1, min(4, len(usable_cores()) // 4))
        self._threads: ThreadPoolExecutor | None = None

    def __call__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each second tensor into the first; equal shapes, contiguous rows."""
        if self._width == 1:
            _copy(pairs)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._width, "vllm-compat-copy")
        parts = [
            (target[row : row + step], source[row : row + step])
            for target, source in pairs
            for step in (max(1, _SMALL // max(1, target[0].nbytes)),)
            for row in range(0, target.shape[0], step)
        ]
        chunks = [parts[i :: self._width] for i in range(self._width)]
        try:
            copies = [self._threads.submit(_copy, chunk) for chunk in chunks]
        except RuntimeError:  # this process may not have more threads
            # Those that there are must have ended: a block is written again once it is read.
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads, self._width = None, 1
            _copy(pairs)
            return
        for copy in copies:
            copy.result()

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        # numpy copies in this very thread, with Python's lock released.
        numpy.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
