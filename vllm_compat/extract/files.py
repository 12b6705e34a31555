"""``data_{i}.pt``: written whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DiskError

__all__ = [
    "data_files",
    "is_whole",
    "leftovers",
    "packed",
    "path_of",
    "sync_folder",
    "write_whole",
]

_DATA = re.compile(r"data_(\d+)\.pt")
# Not ".pt" at the end: speculators' training takes every file of that name in the folder.
_PART = re.compile(r"data_(\d+)\.pt\.[0-9a-f]+\.part")

_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit for files (ulimit -f)",
}


def path_of(folder: Path, index: int) -> Path:
    """Where sample ``index`` goes."""
    return folder / f"data_{index}.pt"


def packed(sample: dict[str, Any]) -> memoryview:
    """A sample in torch's format, as bytes that depend on its values alone.

    In memory first: torch.save into a file that can't grow any more ends the process from a
    destructor, in place of an error.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(sample, buffer)
    return buffer.getbuffer()


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Writes a file so that it is there whole or isn't there.

    The bytes are on the disk before the file gets its name. The temporary name is unique: a
    writer that is thought to be dead (a node that lost its network) may still be at it.

    Raises:
        DiskError: it can't be written; nothing of it is left.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        why = _WHY.get(error.errno or 0, f"{error.strerror or error}")
        raise DiskError(f"{path} can't be written: {why}.") from error


def sync_folder(folder: Path) -> None:
    """Makes the names of files in a folder survive a loss of power."""
    # Some network file systems have no fsync for folders; they need none.
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def data_files(folder: Path) -> Iterator[tuple[int, int]]:
    """Index and size in bytes of each data file that is there."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (match := _DATA.fullmatch(entry.name)) and entry.is_file():
                yield int(match.group(1)), entry.stat().st_size


def leftovers(folder: Path) -> Iterator[tuple[int, Path]]:
    """Index and path of each file that a stopped run had begun."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if match := _PART.fullmatch(entry.name):
                yield int(match.group(1)), Path(entry.path)


def is_whole(path: Path) -> bool:
    """Whether a file ends as a file of torch.save does: its directory is at its end."""
    with contextlib.suppress(OSError):
        return zipfile.is_zipfile(path)
    return False
