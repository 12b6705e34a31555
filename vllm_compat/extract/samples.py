"""The conversations of a run: prepared by speculators, read without Python lists."""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from ..system import usable_cores
from .errors import ExtractError, OutputConflictError

__all__ = ["Samples", "prepare"]


@dataclass(frozen=True)
class Samples:
    """Token ids and loss masks, indexed as speculators' script indexes its files.

    Attributes:
        ids: all token ids, one sample after the other; int64.
        mask: 1 where a token is trained on, else 0; int64, as long as ``ids``.
        starts: where each sample begins, and the end of the last; int64.
    """

    ids: Any
    mask: Any
    starts: Any

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return len(self.ids)

    def sample(self, index: int) -> tuple[Any, Any]:
        """Token ids and loss mask of one sample; views."""
        part = slice(self.starts[index], self.starts[index + 1])
        return self.ids[part], self.mask[part]

    def length(self, index: int) -> int:
        """Tokens of one sample."""
        return int(self.starts[index + 1] - self.starts[index])

    @property
    def identity(self) -> str:
        """A hash of all of it."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.starts, self.ids, self.mask):
            digest.update(numpy.ascontiguousarray(array).view(numpy.uint8))
        return digest.hexdigest()

    @classmethod
    def of(cls, ids: list[Any], masks: list[Any]) -> Samples:
        """From a list of sequences each."""
        lengths = [len(x) for x in ids]
        if lengths != [len(m) for m in masks]:
            raise ExtractError("A loss mask is not as long as its sample.")
        starts = numpy.concatenate([[0], numpy.cumsum(lengths)]).astype(numpy.int64)
        empty: list[Any] = [numpy.empty(0, numpy.int64)]
        return cls(
            numpy.concatenate([*map(numpy.asarray, ids), *empty]).astype(numpy.int64),
            numpy.concatenate([*map(numpy.asarray, masks), *empty]).astype(numpy.int64),
            starts,
        )

    @classmethod
    def of_dataset(cls, dataset: Any) -> Samples:
        """From speculators' preprocessed ``datasets.Dataset``."""
        table = dataset.with_format("arrow")[:]
        ids, starts = _flat(table["input_ids"])
        mask, mask_starts = _flat(table["loss_mask"])
        if not numpy.array_equal(starts, mask_starts):
            raise ExtractError("A loss mask is not as long as its sample.")
        return cls(ids, mask, starts)


def _flat(column: Any) -> tuple[Any, Any]:
    """Values and offsets of a column of lists, chunked and sliced in whatever way."""
    values: list[Any] = [numpy.empty(0, numpy.int64)]
    lengths: list[Any] = [numpy.empty(0, numpy.int64)]
    for chunk in column.chunks if hasattr(column, "chunks") else [column]:
        values.append(chunk.flatten().to_numpy(zero_copy_only=False))
        lengths.append(chunk.value_lengths().to_numpy(zero_copy_only=False))
    starts = numpy.concatenate([[0], numpy.cumsum(numpy.concatenate(lengths))])
    return numpy.concatenate(values).astype(numpy.int64), starts.astype(numpy.int64)


def prepare(
    model: str,
    data: str,
    *,
    seq_length: int,
    seed: int = 0,
    max_samples: int | None = None,
    token_freq_path: Path = Path("token_freq.pt"),
    cache_dir: str | None = None,
    assistant_pattern: str | None = None,
    turn_dropout: bool = False,
    workers: int | None = None,
) -> Samples:
    """Chat template, token ids, loss masks and token frequencies, by speculators.

    The arguments are those of its ``load_and_preprocess_dataset``. What is random in there
    (the turns that ``turn_dropout`` leaves out) is made to depend on ``seed`` alone, so that
    every run and every shard has the same samples; that takes one process.

    Raises:
        ExtractError: the data can't be read, or nothing of it is left.
        OutputConflictError: ``token_freq_path`` counts the tokens of other data. speculators
            itself would keep that file without a word.
    """
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    if data.endswith((".json", ".jsonl")) and not Path(data).is_file():
        raise ExtractError(f"There is no file {data}.")
    processes: int | None = workers or min(8, len(usable_cores()))
    # Python seeds `random` anew in a forked process, so what is random stays in this one.
    processes = None if turn_dropout else processes
    with tempfile.TemporaryDirectory() as folder, _seeded(seed), _quiet():
        counted = Path(folder) / token_freq_path.name
        try:
            dataset, _ = load_and_preprocess_dataset(
                target_model_path=model,
                train_data_path=data,
                seq_length=seq_length,
                build_dataset_num_proc=processes,
                seed=seed,
                max_samples=max_samples,
                token_freq_path=str(counted),
                cache_dir=cache_dir,
                assistant_pattern=assistant_pattern,
                turn_dropout=turn_dropout,
            )
        except (ValueError, OSError, IndexError, KeyError) as error:
            sentence = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ExtractError(f"speculators can't prepare {data}: {sentence}") from error
        samples = Samples.of_dataset(dataset)
        if not len(samples):
            raise ExtractError(f"speculators left no sample of {data}.")
        _keep_frequencies(counted, token_freq_path)
    return samples


def _keep_frequencies(counted: Path, target: Path) -> None:
    import torch

    from .files import write_whole

    if target.exists():
        if torch.load(target, weights_only=True) != torch.load(counted, weights_only=True):
            raise OutputConflictError(
                f"{target} counts the tokens of other data. Name another file with "
                "--token-freq-path, or remove it."
            )
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, counted.read_bytes())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the sample that speculators shows in full, and without bars in a log file."""
    import datasets

    logger = logging.getLogger("speculators")
    before = logger.level
    logger.setLevel(logging.WARNING)
    hide = not sys.stderr.isatty() and datasets.is_progress_bar_enabled()
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(before)
        if hide:
            datasets.enable_progress_bars()
