"""Conversations to files of hidden states, with speculators' own parts.

This is what speculators' script data_generation_offline.py does, in the same order
and with the same files as a result. The only addition is the two lines that apply
vllm_compat.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0


@dataclass(frozen=True)
class Run:
    """How a run went: layer ids in the files' order, counts, and seconds by the clock."""

    layer_ids: list[int]
    samples: int
    tokens: int
    start_seconds: float
    generate_seconds: float


def progress_bar(total: int, desc: str, unit: str) -> Any:
    """tqdm's bar; where there is no terminal, a line every ten seconds."""
    from tqdm import tqdm

    often = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=desc, unit=unit, mininterval=often, ncols=80)


def preprocess(
    model: Path, conversations: Path, work: Path, seq_length: int, samples: int | None
) -> Any:
    """Chat template, token ids and loss mask, by speculators. A datasets.Dataset.

    The samples are shuffled, always in the same way, before the first `samples` are
    taken. Sample i of the result becomes the file data_{i}.pt.
    """
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    work.mkdir(parents=True, exist_ok=True)
    dataset, _ = load_and_preprocess_dataset(
        target_model_path=str(model),
        train_data_path=str(conversations),
        seq_length=seq_length,
        build_dataset_num_proc=1,
        seed=SEED,
        max_samples=samples,
        token_freq_path=str(work / "token_freq.pt"),
        cache_dir=str(work / "datasets"),
    )
    return dataset


def write_states(
    model: Path,
    dataset: Any,
    output: Path,
    *,
    conversations: Path,
    work: Path,
    seq_length: int,
    samples: int | None,
    layer_ids: Sequence[int] | None = None,
    batch_size: int = 8,
) -> Run:
    """Write data_{i}.pt for every sample of `dataset`, and data_config.json.

    A file holds a dict: input_ids, int64 [n]; hidden_states, a list with one bfloat16
    tensor [n, hidden] for each layer; loss_mask, int64 [n]. Files of an earlier run in
    `output` are removed first.
    """
    import vllm_compat

    vllm_compat.apply()

    import torch
    from speculators.data_generation.config_generator import DataGenerationConfig
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    output.mkdir(parents=True, exist_ok=True)
    for old in [*output.glob("data_*.pt"), output / "data_config.json"]:
        old.unlink(missing_ok=True)

    began = time.monotonic()
    generator = VllmHiddenStatesGenerator(
        model_path=str(model),
        layer_ids=None if layer_ids is None else list(layer_ids),
        max_model_len=seq_length,
    )
    started = time.monotonic()

    tokens = 0
    seconds = 0.0
    with progress_bar(total=len(dataset), desc="states", unit="sample") as progress:
        for first in range(0, len(dataset), batch_size):
            batch = dataset[first : first + batch_size]
            before = time.monotonic()
            results = generator.generate(batch["input_ids"])
            seconds += time.monotonic() - before
            for index, (result, loss_mask) in enumerate(
                zip(results, batch["loss_mask"], strict=True), start=first
            ):
                length = len(result["input_ids"])
                torch.save(
                    {
                        "input_ids": result["input_ids"],
                        "hidden_states": [h.contiguous() for h in result["hidden_states"]],
                        # The generator leaves out the last token of a sample of full length.
                        "loss_mask": loss_mask[:length],
                    },
                    output / f"data_{index}.pt",
                )
                tokens += length
            progress.update(len(results))

    config = DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=str(conversations),
        seq_length=seq_length,
        cache_dir=str(work / "datasets"),
        num_samples=len(dataset),
        max_samples=samples,
        seed=SEED,
    )
    (output / "data_config.json").write_text(json.dumps(config.to_dict(), indent=2))
    run = Run(list(generator.layer_ids), len(dataset), tokens, started - began, seconds)
    # Ends the engine's worker here rather than at some later collection.
    del generator
    return run
