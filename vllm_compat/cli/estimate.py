"""``estimate``: what a run will take, before it takes it."""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..extract.ahead import check_model
from ..model_shape import default_layers, read_shape
from .console import Console, human_bytes, only_results_on_stdout
from .errors import CommandError
from .machine import memory

__all__ = ["Estimate", "Model", "add", "estimate", "ring_bytes"]

_DESCRIPTION = """\
Says how many tokens a run has, and what it takes: bytes on disk, memory of a batch in the
process that drives vLLM, memory of the ring that rows travel through. Tokens are counted with
speculators' own preprocessing (chat template, cut to --max-len), on a sample of the
conversations where there are many. Loads no model.

  vllm-compat estimate --model MODEL --data sharegpt.jsonl --output training_data
  vllm-compat estimate --model MODEL --data ultrachat --layers 2 14 27 --max-len 4096

--data is what speculators' script calls --train-data-path, --max-len its --seq-length.
Exit status 0: it fits on the disk of --output; 1: it doesn't.
"""

_GENERATOR_TOKENS = 8192  # the generator's least max_num_batched_tokens
_RING = (16 << 20, 512 << 20)  # bytes; the bounds of vllm_compat.engine
_TIGHT = 0.9  # of what is free: a disk that is filled to the brim is slow
_SEED = 0  # of speculators' script, whose shuffle decides what --max-samples keeps


@dataclass(frozen=True)
class Model:
    """What of a model decides the size of its states."""

    layers: int
    hidden_size: int
    itemsize: int


@dataclass(frozen=True)
class Estimate:
    """What a run takes. Bytes, unless it says otherwise.

    Attributes:
        samples: files.
        tokens: of all samples.
        uncertainty: of ``tokens``: half of the 95 % interval, 0 if all were counted.
        longest: tokens of the longest sample that was counted.
        per_token: bytes on disk.
        disk: bytes on disk of all files.
        batch: of a batch of average samples, in the driver.
        batch_most: of a batch in which all are of full length.
        ring: memory shared by the worker and the driver.
    """

    samples: int
    tokens: int
    uncertainty: int
    longest: int
    per_token: int
    disk: int
    batch: int
    batch_most: int
    ring: int


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "estimate",
        help="tokens, bytes on disk and memory of a run, before it fills the disk",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, or name on the hub")
    parser.add_argument(
        "--data", required=True, help=".json/.jsonl with conversations, or speculators' name"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="K", help="default: the generator's own choice"
    )
    parser.add_argument(
        "--max-len", type=int, default=2048, metavar="N", help="tokens of a sample at most"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="as the script's")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="as the script's (default: 8)"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=2000,
        metavar="N",
        help="conversations to count; 0 counts all (default: 2000)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where the files will go"
    )
    parser.add_argument("--hf-cache-dir", metavar="DIR", help="as the script's")
    parser.add_argument("--json", action="store_true", help="plain values")
    parser.set_defaults(function=_run)


def _run(parsed: argparse.Namespace) -> int:
    notes = Console(sys.stderr)
    with only_results_on_stdout():
        model, count = _model(parsed.model)
        layers = _layers(parsed.layers, count)
        notes.line("Counting tokens with speculators' preprocessing ...", style="dim")
        rows, lengths = _lengths(parsed)
    found = estimate(
        Model(len(layers), model.hidden_size, model.itemsize),
        rows,
        lengths,
        max_len=parsed.max_len,
        batch_size=parsed.batch_size,
    )
    free = shutil.disk_usage(_existing(parsed.output)).free
    fits = found.disk < _TIGHT * free
    if parsed.json:
        values = {**vars(found), "layer_ids": layers, "free": free, "fits": fits}
        sys.stdout.write(json.dumps(values, indent=1) + "\n")
    else:
        _show(parsed, layers, model, found, free, Console())
    return 0 if fits else 1


def estimate(
    model: Model, rows: int, lengths: Sequence[int], *, max_len: int, batch_size: int
) -> Estimate:
    """Computes it.

    Args:
        model: layers captured, width and bytes of a value.
        rows: conversations that there are.
        lengths: tokens of the samples that were counted, 0 for a conversation that the
            preprocessing drops; one for each of ``rows``, or for a random part of them.
        max_len: tokens of a sample at most.
        batch_size: samples in one call of ``generate``.
    """
    # The generator keeps one position for the token that vLLM has to generate.
    kept = [min(length, max_len - 1) for length in lengths if length]
    if not kept:
        raise CommandError("the preprocessing leaves no sample of this data.")
    share = len(kept) / len(lengths)
    samples = round(rows * share)
    mean = statistics.fmean(kept)
    tokens = sum(kept) if len(lengths) == rows else round(samples * mean)
    spread = 0.0
    if len(lengths) < rows and len(kept) > 1:
        error = statistics.stdev(kept) / math.sqrt(len(kept))
        spread = 1.96 * samples * error * math.sqrt(1 - len(lengths) / rows)
    states = model.layers * model.hidden_size * model.itemsize
    per_token = states + 8 + 8  # input_ids and loss_mask, int64
    overhead = _file_overhead(model)
    return Estimate(
        samples=samples,
        tokens=tokens,
        uncertainty=round(spread),
        longest=max(kept),
        per_token=per_token,
        disk=tokens * per_token + samples * overhead,
        batch=round(min(batch_size, samples) * mean * states),
        batch_most=min(batch_size, samples) * (max_len - 1) * states,
        ring=ring_bytes(max(_GENERATOR_TOKENS, max_len), model.layers, model.hidden_size),
    )


def ring_bytes(tokens: int, layers: int, hidden_size: int) -> int:
    """Size of the ring between worker and driver, as ``vllm_compat.engine`` chooses it.

    Args:
        tokens: of a scheduler step at most (``max_num_batched_tokens``).
        layers: captured.
        hidden_size: width of a row, in bf16.
    """
    low, high = _RING
    size = min(max(2 * tokens * layers * hidden_size * 2, low), high)
    return -(-size // 4096) * 4096


def _file_overhead(model: Model) -> int:
    """What a file has besides its numbers: zip records, names, padding, rest of a block."""
    import torch

    buffer = io.BytesIO()
    dtype = {1: torch.uint8, 2: torch.bfloat16}.get(model.itemsize, torch.float32)
    row = (1, model.hidden_size)
    states = [torch.zeros(row, dtype=dtype, device="cpu") for _ in range(model.layers)]
    ids = torch.zeros(1, dtype=torch.long, device="cpu")
    torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": ids.clone()}, buffer)
    payload = model.layers * model.hidden_size * model.itemsize + 16
    return len(buffer.getvalue()) - payload + 2048  # half a block of a file system on average


def _model(name: str) -> tuple[Model, int]:
    check_model(name)
    shape = read_shape(name)
    # vLLM computes what is stored in float32 in 16 bits, and stores its states in those.
    return Model(0, shape.hidden_size, 2), shape.layers


def _layers(asked: list[int] | None, count: int) -> list[int]:
    layers = list(default_layers(count) if asked is None else asked)
    outside = [k for k in layers if not 0 <= k < count]
    if outside:
        raise CommandError(
            f"layer {outside[0]} is outside of [0, {count - 1}]: the model has {count} layers."
        )
    return layers


def _lengths(parsed: argparse.Namespace) -> tuple[int, list[int]]:
    """How many conversations there are, and the tokens of those that were counted."""
    try:
        from speculators.data_generation import preprocessing
    except ImportError as error:
        raise CommandError(
            f"speculators' preprocessing can't be imported ({error}); `vllm-compat doctor` "
            "says more."
        ) from error
    from transformers import AutoTokenizer

    logging.getLogger("speculators").setLevel(logging.ERROR)
    data = parsed.data
    if data.endswith((".json", ".jsonl")) and not Path(data).is_file():
        raise CommandError(f"there is no file {data}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(parsed.model, trust_remote_code=True)
        raw = preprocessing.load_raw_dataset(data, num_proc=1, cache_dir=parsed.hf_cache_dir)
        # The same choice as the script's.
        raw = raw.shuffle(seed=_SEED)
        rows = len(raw) if parsed.max_samples is None else min(parsed.max_samples, len(raw))
        count = min(rows, parsed.sample) if parsed.sample > 0 else rows
        if not count:
            raise CommandError(f"{data} has no conversations.")
        built = preprocessing.build_eagle3_dataset(
            dataset=raw.select(range(count)),
            tokenizer=tokenizer,
            max_length=parsed.max_len,
            num_proc=1,
        )
    except (OSError, ValueError, TypeError) as error:
        raise CommandError(f"speculators' preprocessing of {data} failed: {error}") from error
    lengths = [len(ids) for ids in built["input_ids"]]
    return rows, lengths + [0] * (count - len(lengths))


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _show(
    parsed: argparse.Namespace,
    layers: Sequence[int],
    model: Model,
    found: Estimate,
    free: int,
    console: Console,
) -> None:
    about = f" (± {found.uncertainty:,})" if found.uncertainty else ""
    available = memory().available
    mean = found.tokens / found.samples
    rate = human_bytes(found.per_token * 1000)
    rows = [
        ("samples", f"{found.samples:,} files"),
        (
            "tokens",
            f"{found.tokens:,}{about}; {mean:,.0f} on average, {found.longest:,} at most",
        ),
        (
            "states",
            f"layers {', '.join(map(str, layers))} x {model.hidden_size} x "
            f"{model.itemsize} bytes",
        ),
        (
            "disk",
            f"{human_bytes(found.disk)}; {rate} for 1,000 tokens",
        ),
        ("free", f"{human_bytes(free)} at {_existing(parsed.output)}"),
        (
            "batch",
            f"{human_bytes(found.batch)} of memory for {parsed.batch_size} samples, "
            f"{human_bytes(found.batch_most)} if all are of full length",
        ),
        ("ring", f"{human_bytes(found.ring)} of memory, shared by worker and driver"),
        ("memory", f"{human_bytes(available)} available"),
    ]
    console.table(["what", "how much"], rows)
    console.line()
    if found.batch_most + found.ring > available:
        console.line(
            "warning: a batch of full length has no room in memory; lower --batch-size.",
            style="yellow",
        )
    if found.disk >= _TIGHT * free:
        console.line(
            f"DOESN'T FIT: {human_bytes(found.disk)} on a disk with {human_bytes(free)} free. "
            "Fewer --layers, a smaller --max-len or --max-samples, or another --output.",
            style="red",
        )
    else:
        share = found.disk / free if free else 1.0
        console.line(
            f"It fits: {share:.0%} of what is free. The disk has to take {rate}/s for each "
            "1,000 tokens/s.",
            style="green",
        )
    if os.environ.get("HF_HUB_OFFLINE") and not Path(parsed.model).is_dir():
        console.line("note: HF_HUB_OFFLINE is set, and the model is no local folder.")
