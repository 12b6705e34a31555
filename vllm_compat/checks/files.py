"""Goes over the files that a run wrote: is every sample there, whole, and like the others?

The layout is that of speculators' script: ``data_{i}.pt``, each a dict with ``input_ids``
[n], ``hidden_states``, a list with one tensor [n, hidden] for each layer, and ``loss_mask``
[n]; beside them ``data_config.json`` and, from speculators 0.4.0 on, ``sample_lengths.json``.
``vllm-compat extract`` adds ``manifest.json``, which names samples that could not be computed.

Several threads read a file each; nothing of it is kept but a few numbers for each layer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import struct
import threading
import time
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..system import usable_cores

__all__ = ["Check", "Sample", "check_directory", "check_file"]

_NAME = re.compile(r"data_(\d+)\.pt")
_KEYS = {"input_ids", "hidden_states", "loss_mask"}
_PIECE = 1 << 20  # bytes read at a time
_NORM_PIECE = 1 << 16  # values whose norms are computed at a time
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field

# A file is like the others if the norms of its rows are within so many times their spread
# (the median absolute deviation, as a standard deviation) of theirs, or within the factor.
# Norms of right files of a layer differ by some per cent; of neighbouring layers by a tenth to
# a half, of a layer's scaled states by the scale.
_SPREAD = 10.0
_FACTOR = 1.5
_ENOUGH = 8  # files, below which there is no telling what is usual
_SHORT = 4  # tokens, below which the first one, an attention sink, outweighs the others


@dataclass
class Sample:
    """What is kept of one file.

    Attributes:
        name: of the file.
        size: bytes.
        tokens: length of ``input_ids``.
        shape: layers, hidden size and dtype of the states.
        norms: for each layer the least, the median and the largest norm of a row.
        wrong: a clause for each fault.
    """

    name: str
    size: int = 0
    tokens: int = 0
    shape: tuple[int, int, str] = (0, 0, "")
    norms: list[tuple[float, float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass
class Check:
    """What :func:`check_directory` found.

    Attributes:
        directory: that was looked at.
        samples: by index.
        missing: indices without a file, and without a reason for that.
        failed: indices that have none because ``manifest.json`` says why.
        wrong: faults of the directory as a whole.
        notes: what is odd, and no fault.
        layer_ids: of ``data_config.json``; empty if it doesn't say.
        nbytes: bytes read.
        seconds: by the clock.
    """

    directory: Path
    samples: dict[int, Sample]
    missing: list[int]
    failed: dict[int, str]
    wrong: list[str]
    notes: list[str]
    layer_ids: list[int]
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def bad(self) -> list[Sample]:
        """The samples that are not sound, by index."""
        return [s for _, s in sorted(self.samples.items()) if s.wrong]

    @property
    def sound(self) -> bool:
        return not (self.missing or self.wrong or self.bad)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.samples.values())


def check_directory(
    directory: Path,
    *,
    expected: int | None = None,
    threads: int | None = None,
    checksums: bool = True,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Check:
    """Goes over all ``data_*.pt`` of a directory.

    Args:
        directory: of one run.
        expected: how many samples there should be; by default what ``data_config.json`` or
            ``manifest.json`` says, else as many as the largest index.
        threads: how many files to read at a time; by default one for each core, at least two.
        checksums: also compare each file's contents with the checksums in it.
        progress: called with the bytes of each file that is done.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    began = time.monotonic()
    entries = sorted(directory.iterdir())
    files = {int(m[1]): f for f in entries if (m := _NAME.fullmatch(f.name))}
    config, config_fault = _object(
        directory / "data_config.json",
        "no data_config.json: the run has not come to its end",
    )
    # Of ``vllm-compat extract``; other programs write none.
    manifest, manifest_fault = _object(directory / "manifest.json", "")
    failed = {i: why for i, why in _failed(manifest).items() if i not in files}
    result = Check(directory, {}, [], failed, [], [], _layer_ids(config))
    result.notes += [fault for fault in (config_fault, manifest_fault) if fault]
    result.notes += [
        f"{f.name} is left over from a run that was stopped"
        for f in entries
        if f.name.startswith("data_") and f.suffix in (".tmp", ".part")
    ]
    result.samples, result.nbytes = _read_all(files, threads, checksums, progress)
    for counts, name in (
        (config.get("data"), "num_samples"),
        (manifest.get("counts"), "samples"),
    ):
        if expected is None and isinstance(counts, dict):
            expected = counts.get(name)
    if expected is None:
        expected = max((*files, *failed), default=-1) + 1
    result.missing = sorted(set(range(expected)) - set(files) - set(failed))
    if not files:
        result.wrong.append("no data_*.pt here")
    result.wrong += [
        f"{files[index].name} is beyond the {expected} samples that there should be"
        for index in sorted(files)
        if index >= expected
    ]
    _compare_shapes(result)
    _compare_lengths(result, directory)
    _compare_norms(result)
    result.seconds = time.monotonic() - began
    return result


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


# -- one file ----------------------------------------------------------------------------------


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


# -- all files ---------------------------------------------------------------------------------


def _read_all(
    files: dict[int, Path],
    threads: int | None,
    checksums: bool,
    progress: Callable[[int], None],
) -> tuple[dict[int, Sample], int]:
    threads = threads or max(2, len(usable_cores()))
    told = threading.Lock()
    nbytes = 0

    def one(item: tuple[int, Path]) -> tuple[int, Sample]:
        nonlocal nbytes
        sample = check_file(item[1], checksums)
        with told:
            nbytes += sample.size
            progress(sample.size)
        return item[0], sample

    before = torch.get_num_threads()
    # Many files at a time, each by one thread: less waiting for one another.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="check") as pool:
            try:
                return dict(pool.map(one, sorted(files.items()))), nbytes
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)


def _object(path: Path, absent: str) -> tuple[dict[str, Any], str]:
    """What a file of JSON says, and what is wrong with it; `absent` if it isn't there."""
    if not path.exists():
        return {}, absent
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"{path.name} can't be read: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"{path.name} is no object")


def _failed(manifest: dict[str, Any]) -> dict[int, str]:
    failed = manifest.get("failed")
    if not isinstance(failed, dict):
        return {}
    return {int(index): str(why) for index, why in failed.items() if str(index).isdigit()}


def _layer_ids(config: dict[str, Any]) -> list[int]:
    states = config.get("hidden_states")
    ids = states.get("layer_ids") if isinstance(states, dict) else None
    return [int(i) for i in ids] if isinstance(ids, list) else []


def _compare_shapes(result: Check) -> None:
    by_shape: dict[tuple[int, int, str], list[Sample]] = defaultdict(list)
    for sample in result.samples.values():
        if sample.shape[0]:
            by_shape[sample.shape].append(sample)
    if result.layer_ids:
        for sample in _of(by_shape.values()):
            if sample.shape[0] != len(result.layer_ids):
                sample.wrong.append(
                    f"has {sample.shape[0]} layers; data_config.json names "
                    f"{len(result.layer_ids)}"
                )
    if len(by_shape) > 1:
        usual = max(by_shape, key=lambda shape: len(by_shape[shape]))
        for shape, samples in by_shape.items():
            if shape != usual:
                for sample in samples:
                    sample.wrong.append(f"has {_shape(shape)}; the others {_shape(usual)}")


def _shape(shape: tuple[int, int, str]) -> str:
    return f"{shape[0]} layers of {shape[1]} {shape[2]}"


def _of(groups: Iterable[list[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def _compare_lengths(result: Check, directory: Path) -> None:
    try:
        lengths = json.loads((directory / "sample_lengths.json").read_text("utf-8"))
    except (OSError, ValueError):
        return
    for index, sample in result.samples.items():
        length = lengths.get(str(index)) if isinstance(lengths, dict) else None
        if sample.tokens and length not in (None, sample.tokens):
            sample.wrong.append(
                f"has {sample.tokens} tokens; sample_lengths.json says {length}"
            )


def _compare_norms(result: Check) -> None:
    """Names files whose rows are unlike those of the others at the same layer."""
    whole = [s for s in result.samples.values() if s.norms and not s.wrong]
    long = [s for s in whole if s.tokens >= _SHORT]
    if len(long) < _ENOUGH:
        return
    for place in range(max(len(s.norms) for s in long)):
        for which, what in enumerate(("smallest", "median", "largest")):
            values = {
                id(s): math.log(s.norms[place][which]) for s in long if place < len(s.norms)
            }
            middle = statistics.median(values.values())
            spread = 1.4826 * statistics.median(abs(v - middle) for v in values.values())
            # The extremes of a file depend on its length and its text; the median doesn't.
            factor = _FACTOR if what == "median" else 4 * _FACTOR
            allowed = max(_SPREAD * spread, math.log(factor))
            for sample in long:
                off = values.get(id(sample), middle) - middle
                if abs(off) > allowed:
                    name = result.layer_ids[place] if result.layer_ids else f"[{place}]"
                    sample.wrong.append(
                        f"layer {name}: the {what} norm of its rows is "
                        f"{math.exp(off):.2g} times that of the other files"
                    )
                    break
