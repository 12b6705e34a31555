"""The conversations of a run: prepared by speculators, read without Python lists."""

from __future__ import annotations

import hashlib
import io
import logging
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from ..system import usable_cores
from .errors import DiskError, ExtractError, OutputConflictError
from .files import write_whole
from .rows import check_beginning, fault_in
from .unused import failing, first_line, unused_rows

__all__ = ["Samples", "check_frequencies", "keep_frequencies", "prepare"]


@dataclass(frozen=True)
class Samples:
    """Token ids and loss masks, indexed as speculators' script indexes its files.

    Attributes:
        ids: all token ids, one sample after the other; int64.
        mask: 1 where a token is trained on, else 0; int64, as long as ``ids``.
        starts: where each sample begins, and the end of the last; int64.
        unused: rows of the data that speculators made no sample of.
        unused_names: the first of them, and why.
        frequencies: of tokens, as speculators' file holds them; empty: there is none.
    """

    ids: Any
    mask: Any
    starts: Any
    unused: int = 0
    unused_names: tuple[str, ...] = ()
    frequencies: bytes = b""

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

    def trained(self, most: int) -> Any:
        """How many tokens of each sample's first ``most`` are trained on; int64."""
        sums = numpy.concatenate([[0], numpy.cumsum(self.mask)])
        ends = numpy.minimum(self.starts[1:], self.starts[:-1] + most)
        return sums[ends] - sums[self.starts[:-1]]

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
        ExtractError: the tokenizer can't be had or the data be read, or nothing of it is left.
    """
    check_beginning(data)
    import datasets
    from speculators.data_generation import preprocessing

    processes: int | None = workers or min(8, len(usable_cores()))
    # Python seeds `random` anew in a forked process, so what is random stays in this one.
    processes = None if turn_dropout else processes
    tokenizer = _tokenizer(model)
    with tempfile.TemporaryDirectory() as folder, _seeded(seed), _quiet():
        counted = Path(folder) / "token_freq.pt"
        raw = _raw(preprocessing, data, processes, cache_dir)
        chosen = _chosen(len(raw), seed, max_samples)
        prepared: Any = ()

        def build(turns: list[Any]) -> int:
            """How many of some conversations speculators makes samples of."""
            rows = datasets.Dataset.from_dict({"conversations": turns})
            make = preprocessing.build_eagle3_dataset
            return len(make(rows, tokenizer, seq_length, None, assistant_pattern))

        trouble: Exception | None = None
        try:
            prepared, _ = preprocessing.load_and_preprocess_dataset(
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
        except (IndexError, KeyError) as error:
            trouble = error  # what it ends in when no sample is left
        except Exception as error:  # from a process of its own, whatever happened there
            raise ExtractError(
                fault_in(data)
                or f"speculators can't prepare {data}: {failing(build, raw, chosen, data)}"
                f"{first_line(error)}"
            ) from error
        unused = len(chosen) - len(prepared)
        names: Sequence[str] = ()
        if unused:
            names = unused_rows(build, raw, chosen, unused, data)
        if not len(prepared):
            why = names[0] if names else first_line(trouble) if trouble else "it has none"
            raise ExtractError(
                f"speculators left none of the {len(raw)} samples of {data}: {why}."
            ) from trouble
        return replace(
            Samples.of_dataset(prepared),
            unused=unused,
            unused_names=tuple(names),
            frequencies=counted.read_bytes(),
        )


def keep_frequencies(counted: bytes, target: Path, ours: bool) -> None:
    """Writes the token frequencies.

    Args:
        counted: the file's contents, of speculators.
        target: where to.
        ours: the file belongs to the output folder, which was compared with the data already.

    Raises:
        OutputConflictError: ``target`` counts the tokens of other data. speculators itself
            would keep that file without a word.
        DiskError: it can't be written.
    """
    if not ours:
        check_frequencies(counted, target)
    if target.exists() and (not ours or target.read_bytes() == counted):
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{target} can't be written: {error.strerror or error}.") from error
    write_whole(target, counted)


def check_frequencies(counted: bytes, target: Path) -> None:
    """Refuses a file that counts the tokens of other data.

    Raises:
        OutputConflictError: it does.
    """
    import torch

    if not target.exists():
        return
    try:
        there = torch.load(target, weights_only=True)
    except Exception as error:  # a file of another program fails in many ways
        raise OutputConflictError(
            f"{target} is there and can't be read. Name another file with --token-freq-path."
        ) from error
    if there != torch.load(io.BytesIO(counted), weights_only=True):
        raise OutputConflictError(
            f"{target} counts the tokens of other data. Name another file with "
            "--token-freq-path, or remove it."
        )


# -- inside ------------------------------------------------------------------------------------


def _tokenizer(model: str) -> Any:
    """As speculators loads it; its errors are not the data's."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    except Exception as error:  # code of a checkpoint's own among it
        raise ExtractError(
            f"The tokenizer of {model} can't be loaded: {first_line(error)}"
        ) from error
    if getattr(tokenizer, "chat_template", None) is None:
        raise ExtractError(
            f"The tokenizer of {model} has no chat template: speculators makes the text "
            "of a conversation with it. Add chat_template.jinja, or take the model that was "
            "tuned for instructions."
        )
    return tokenizer


def _raw(preprocessing: Any, data: str, processes: int | None, cache_dir: str | None) -> Any:
    """The rows as they are. speculators reads them once more, from the cache of `datasets`."""
    try:
        raw = preprocessing.load_raw_dataset(data, num_proc=processes, cache_dir=cache_dir)
    except Exception as error:  # `datasets` has no class for a file that is wrong
        raise ExtractError(
            fault_in(data) or f"{data} can't be read: {first_line(error)}"
        ) from error
    if "conversations" not in raw.column_names:
        raise ExtractError(
            fault_in(data)
            or f'{data} has no "conversations", but {", ".join(raw.column_names)}.'
        )
    return raw


def _chosen(total: int, seed: int, most: int | None) -> list[int]:
    """The rows that speculators takes: all, or the first ones as it shuffles them."""
    if most is None or most >= total:
        return list(range(total))
    from datasets import Dataset

    shuffled = Dataset.from_dict({"row": range(total)}).shuffle(seed=seed)
    return sorted(shuffled[:most]["row"])


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
