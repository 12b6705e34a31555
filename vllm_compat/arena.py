"""Memory for results: in huge pages, and used again once a result is gone.

A batch of states is hundreds of megabytes, and a script saves one and drops it. From malloc
each batch would be mapped, faulted in page by page and unmapped again: on an H200's host that
took as long as a third of the prefill itself. Here the memory of a dropped result goes to the
next one. A result that is kept keeps its memory, and it alone: blocks are never shared.
"""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy
import torch

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

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised, contiguous CPU tensor with memory of its own."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < _SMALL:
            return torch.empty(shape, dtype=dtype)
        block = self._take(nbytes) or _mapped(-(-nbytes // _HUGE) * _HUGE)
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
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


class Copier:
    """Copies rows with a few threads: one alone moves 1 to 5 GB/s, less than a GPU makes.

    torch's own threads would do, but how many a copy gets depends on the thread that asks
    and on what the user has set for training; and after each copy they spin for the next one,
    on the cores that the workers of a CPU want.
    """

    def __init__(self) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._width = max(1, min(4, cores // 4))
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
        # list(): raises what a thread raised.
        list(self._threads.map(_copy, chunks))

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        # numpy copies in this very thread, with Python's lock released.
        numpy.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
