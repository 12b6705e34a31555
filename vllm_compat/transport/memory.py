"""Memory without a name, which another process of the same user can open by descriptor.

Its pages are reserved when it is made. Memory of a file that is not reserved is taken page by
page as it is written, and a write that finds none left ends the process with SIGBUS.
"""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from typing import Any

from ..system import memory

__all__ = ["nameless"]

SHM = "/dev/shm"
_LEFT_IN_SHM = 32 << 20  # bytes; vLLM's message queues live there, and NCCL's buffers
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_ZEROS = bytes(1 << 20)


def nameless(size: int) -> tuple[FileIO, str]:
    """Makes memory of ``size`` bytes, all of them zero.

    In this order: a memfd; a file without a name in /dev/shm, where Python or the kernel has no
    memfd (conda's Python is built for a C library that lacks it); a file without a name in
    the folder for temporary files, which may be on a disk.

    Returns:
        The file, and what it is, in words.

    Raises:
        OSError: none of them has so much room; the message says why not, for each.
    """
    reasons = []
    if (available := memory().available) < size:
        # Asking the kernel for more than a container may have ends the process.
        raise OSError(errno.ENOMEM, f"{size} bytes wanted, {available} bytes of memory free")
    for kind, make in _choices():
        try:
            file = make()
        except (OSError, AttributeError) as error:
            reasons.append(f"{kind}: {error}")
            continue
        try:
            _reserve(file.fileno(), size)
            if kind == _in(SHM) and _free(SHM) < _LEFT_IN_SHM:
                raise OSError(errno.ENOSPC, f"{SHM} would be full")
        except OSError as error:
            file.close()
            reasons.append(f"{kind}: {error}")
            continue
        return file, kind
    raise OSError(errno.ENOMEM, "; ".join(reasons))


def _choices() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "memfd", _memfd
    yield _in(SHM), functools.partial(tempfile.TemporaryFile, buffering=0, dir=SHM)
    try:
        folder = tempfile.gettempdir()
    except OSError:
        return  # no folder that can be written to
    yield _in(folder), functools.partial(tempfile.TemporaryFile, buffering=0, dir=folder)


def _in(folder: str) -> str:
    return f"file without a name in {folder}"


def _memfd() -> FileIO:
    return FileIO(os.memfd_create("vllm-compat", os.MFD_CLOEXEC), "r+")


def _free(folder: str) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _reserve(fd: int, size: int) -> None:
    """Gives a file its length, and all of its pages.

    Raises:
        OSError: there is no room for them.
    """
    try:
        os.posix_fallocate(fd, 0, size)
        return
    except AttributeError:
        pass  # not every C library has it
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
    # This file system has no such call: what is written is there.
    for start in range(0, size, len(_ZEROS)):
        _write(fd, _ZEROS[: size - start], start)


def _write(fd: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
