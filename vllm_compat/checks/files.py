"""Goes over the files that a run wrote: is every sample there, whole, and like the others?

The layout is that of speculators' script: ``data_{i}.pt``, each a dict with ``input_ids``
[n], ``hidden_states``, a list with one tensor [n, hidden] for each layer, and ``loss_mask``
[n]; beside them ``data_config.json`` and, from speculators 0.4.0 on, ``sample_lengths.json``.
``vllm-compat extract`` adds ``manifest.json``, which names samples that could not be computed.

Several threads read a file each; nothing of it is kept but a few numbers for each layer.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..system import usable_cores
from .one_file import Sample, check_file

__all__ = ["Check", "Sample", "check_directory", "check_file"]

_NAME = re.compile(r"data_(\d+)\.pt")

# A file is like the others if the norms of its rows are within so many times their spread
# (the median absolute deviation, as a standard deviation) of theirs, or within the factor.
# Norms of right files of a layer differ by some per cent; of neighbouring layers by a tenth to
# a half, of a layer's scaled states by the scale.
_SPREAD = 10.0
_FACTOR = 1.5
_ENOUGH = 8  # files, below which there is no telling what is usual
_SHORT = 4  # tokens, below which the first one, an attention sink, outweighs the others


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
    def untrained(self) -> list[int]:
        """Files, sound otherwise, that no token is trained on.

        speculators' script writes them like any other, and their loss and its gradient are 0
        (models/eagle3/core.py, 0.3.0 to 0.4.0.1): a pity, and no fault. All of them are one.
        """
        return [i for i, s in sorted(self.samples.items()) if not (s.wrong or s.trained)]

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
    if files and len(result.untrained) == len(files):
        result.wrong.append(
            "no token of any file is trained on: each loss_mask is all zeros "
            "(--assistant-pattern of extract and of speculators' script says what is)"
        )
    result.seconds = time.monotonic() - began
    return result


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
