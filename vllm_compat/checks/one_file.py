"""One file of a run, by itself: whole, and its parts of one length and finite."""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Sample", "check_file"]

_KEYS = {"input_ids", "hidden_states", "loss_mask"}
_PIECE = 1 << 20  # bytes read at a time
_NORM_PIECE = 1 << 16  # values whose norms are computed at a time
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field


@dataclass
class Sample:
    """What is kept of one file.

    Attributes:
        name: of the file.
        size: bytes.
        tokens: length of ``input_ids``.
        shape: layers, hidden size and dtype of the states.
        trained: how many of the tokens are trained on.
        norms: for each layer the least, the median and the largest norm of a row.
        wrong: a clause for each fault.
    """

    name: str
    size: int = 0
    tokens: int = 0
    trained: int = 0
    shape: tuple[int, int, str] = (0, 0, "")
    norms: list[tuple[float, float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def check_file(path: Path, checksums: bool = True) -> Sample:
    """Looks at one file by itself; what is wrong is in the result, nothing is raised."""
    sample = Sample(path.name)
    try:
        with open(path, "rb") as file:
            sample.size = os.fstat(file.fileno()).st_size
            # Advice, which not every system takes: reading ahead in large pieces. Page faults
            # of a mapping ask for small ones.
            with contextlib.suppress(AttributeError, OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            if fault := _cut(file):
                sample.wrong.append(fault)
                return sample
            if checksums and (fault := _checksums(file)):
                sample.wrong.append(fault)
                return sample
            data = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # a file that is damaged fails in many ways
        lines = str(error).strip().splitlines() or [""]
        sample.wrong.append(f"can't be read: {type(error).__name__}: {lines[0][:200]}")
        return sample
    _look(data, sample)
    return sample


# -- inside ------------------------------------------------------------------------------------


def _cut(file: Any) -> str | None:
    """torch.save writes a zip archive, whose directory is at its end."""
    head = file.read(4)
    if not head:
        return "is empty"
    if head != b"PK\x03\x04":
        return "is no archive of torch.save, or its beginning was never written"
    return None if zipfile.is_zipfile(file) else "is cut off: its end is missing"


def _checksums(file: Any) -> str | None:
    """Compares each record with its CRC-32, which torch.load itself doesn't.

    Read, not mapped: that takes two thirds of the time, and reads ahead by itself.
    """
    buffer = memoryview(bytearray(_PIECE))
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            file.seek(entry.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            signature, name, extra = _LOCAL_HEADER.unpack(header)
            if signature != b"PK\x03\x04":
                return f"is damaged: record {entry.filename} is not where it should be"
            if not entry.CRC:
                continue  # torch can be told to write none
            file.seek(name + extra, os.SEEK_CUR)
            left, checksum = entry.compress_size, 0
            while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
                checksum = zlib.crc32(buffer[:count], checksum)
                left -= count
            if left or checksum != entry.CRC:
                return f"is damaged: the checksum of record {entry.filename} is wrong"
    return None


def _look(data: Any, sample: Sample) -> None:
    wrong = sample.wrong
    if not isinstance(data, dict) or not set(data) >= _KEYS:
        held = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        wrong.append(f"holds {held}, not input_ids, hidden_states and loss_mask")
        return
    ids, states, mask = data["input_ids"], data["hidden_states"], data["loss_mask"]
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or _is_float(ids):
        wrong.append("input_ids is no list of token ids")
        return
    sample.tokens = len(ids)
    if not len(ids):
        wrong.append("has no tokens")
        return
    if int(ids.min()) < 0:
        wrong.append("input_ids has a negative token id")
    if mask is None:
        wrong.append("loss_mask is None; training needs one")
    elif not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        shape = list(getattr(mask, "shape", ())) or type(mask).__name__
        wrong.append(f"loss_mask has {shape} for {len(ids)} ids")
    elif not bool(((mask == 0) | (mask == 1)).all()):
        wrong.append("loss_mask has values other than 0 and 1")
    else:
        sample.trained = int(mask.sum())
    if not isinstance(states, list) or not all(isinstance(s, torch.Tensor) for s in states):
        wrong.append("hidden_states is no list of tensors")
        return
    _look_at_states(states, sample)


def _is_float(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _look_at_states(states: list[torch.Tensor], sample: Sample) -> None:
    if not states:
        sample.wrong.append("hidden_states is empty")
        return
    for place, rows in enumerate(states):
        if rows.dim() != 2 or len(rows) != sample.tokens or not _is_float(rows):
            sample.wrong.append(
                f"hidden_states[{place}] has {list(rows.shape)} {rows.dtype} for "
                f"{sample.tokens} ids"
            )
    if sample.wrong:
        return
    widths = {rows.shape[1] for rows in states} | {rows.dtype for rows in states}
    if len(widths) != 2:
        sample.wrong.append("layers differ in width or dtype")
        return
    dtype = str(states[0].dtype).removeprefix("torch.")
    sample.shape = (len(states), states[0].shape[1], dtype)
    for place, rows in enumerate(states):
        _look_at_rows(place, rows, sample)


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Of each row, in float32. In pieces that stay in a core's cache: twice as fast or more."""
    norms = torch.empty(len(rows), dtype=torch.float32, device="cpu")
    count = max(1, _NORM_PIECE // max(1, rows.shape[1]))
    shape = (min(count, len(rows)), rows.shape[1])
    piece = torch.empty(shape, dtype=torch.float32, device="cpu")
    for start in range(0, len(rows), count):
        part = rows[start : start + count]
        torch.linalg.vector_norm(
            piece[: len(part)].copy_(part), dim=1, out=norms[start : start + count]
        )
    return norms


def _look_at_rows(place: int, rows: torch.Tensor, sample: Sample) -> None:
    norms = _norms(rows)
    # One value that isn't finite makes the norm so; a large one overflows it as well.
    for position in (~torch.isfinite(norms)).nonzero().flatten().tolist():
        if not bool(torch.isfinite(rows[position]).all()):
            sample.wrong.append(f"hidden_states[{place}], position {position}: not finite")
            return
    zeros = (norms == 0).nonzero().flatten()
    if len(zeros):
        sample.wrong.append(
            f"hidden_states[{place}]: {len(zeros)} rows of zeros, the first at position "
            f"{int(zeros[0])}"
        )
        return
    # The first position usually serves attention as a sink, hundreds of times the others.
    rest = norms[1:] if len(norms) > 1 else norms
    sample.norms.append((float(rest.min()), float(rest.median()), float(rest.max())))
