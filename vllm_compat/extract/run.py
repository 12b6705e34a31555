"""A whole run: prepare, compare with what is there, compute what is missing, account for it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from ..system import usable_cores
from . import ahead
from .errors import DiskError, ExtractError
from .execution import Run, Summary
from .files import write_whole
from .job import Job, default_layers, model_identity, on_cpu, row_bytes, versions
from .manifest import Folder
from .plan import check_part, part
from .rows import check_beginning
from .samples import check_frequencies, keep_frequencies, prepare
from .settings import check_folder

__all__ = ["FREQUENCIES", "Summary", "extract"]

FREQUENCIES = "token_freq.torch"  # of the tokens, in the output folder


def extract(
    model: str,
    data: str,
    output: str | os.PathLike[str],
    *,
    replicas: int = 1,
    tensor_parallel_size: int = 1,
    address: str | None = None,
    layer_ids: Sequence[int] | None = None,
    seq_length: int = 2048,
    batch_size: int = 8,
    max_samples: int | None = None,
    start: int | None = None,
    end: int | None = None,
    shard: tuple[int, int] | None = None,
    seed: int = 0,
    gpu_memory_utilization: float = 0.8,
    cpus_per_replica: int | None = None,
    executor: str = "mp",
    transport: str = "auto",
    token_freq_path: str | os.PathLike[str] | None = None,
    cache_dir: str | None = None,
    assistant_pattern: str | None = None,
    turn_dropout: bool = False,
    preprocessing_workers: int | None = None,
    retry_failed: bool = False,
    mixed_versions: bool = False,
    ignore_free_space: bool = False,
    stream: TextIO | None = None,
) -> Summary:
    """Conversations to files, as speculators' script writes them.

    Batch b holds the samples [b * batch_size, (b + 1) * batch_size), in every run: which
    replica computes it, how many there are, and how often the run was stopped make no
    difference to the bytes.

    Args:
        model: checkpoint, a folder or a name on the hub.
        data: conversations: a ``.json`` or ``.jsonl`` file, or a name that speculators knows.
        output: folder for ``data_{i}.pt``; on a cluster one that all machines see.
        replicas: generators. One runs in this process; more on Ray.
        tensor_parallel_size: devices of each.
        address: of a Ray cluster; None for a Ray of its own.
        layer_ids: in the order wanted; None: the generator's choice.
        seq_length: tokens of a sample that vLLM makes room for.
        batch_size: samples for each call of ``generate``.
        max_samples: only so many, of the shuffled data.
        start: first sample of this run.
        end: one past the last.
        shard: (i, n): the i-th of n parts of the data, i from 0; in place of start and end.
        seed: of the shuffling.
        gpu_memory_utilization: the generator's argument.
        cpus_per_replica: CPU cores of each replica; None: the machine's, shared out.
        executor: vLLM's: ``mp``, or ``ray`` for one generator over several machines.
        transport: as for :func:`vllm_compat.apply`.
        token_freq_path: where the token frequencies go; None: ``token_freq.torch`` in the
            folder. Not ``token_freq.pt``, as speculators' script calls it where it is started:
            its training takes every file for a sample whose name ends in "pt" (train/data.py,
            ``list_files``).
        cache_dir: of Hugging Face datasets.
        assistant_pattern: speculators' regular expression for what is trained on.
        turn_dropout: speculators' random choice of turns.
        preprocessing_workers: processes for the preprocessing.
        retry_failed: try samples again that failed in an earlier run.
        mixed_versions: go on in a folder that was begun with other versions.
        ignore_free_space: begin though the disk is too small for all of it.
        stream: where progress is shown; standard error by default.

    Returns:
        What was done.

    Raises:
        ExtractError: an argument, the model or the data are wrong; what is told of them needs
            no GPU, and most of it takes milliseconds.
        OutputConflictError: the folder belongs to something else.
        DiskError: a file could not be written, or will not have room.
        ReplicaError: generators can't be made, or keep dying.
        VllmCompatError: whatever else :func:`vllm_compat.apply` and the generator say.
        KeyboardInterrupt: stopped by SIGINT or SIGTERM. Whatever it is, what was written stays,
            and the same call goes on from there.
    """
    import vllm_compat

    stream = stream or sys.stderr
    folder = Path(output).absolute()
    ahead.check_numbers(
        (
            ("--replicas", replicas, 1),
            ("--tensor-parallel-size", tensor_parallel_size, 1),
            ("--batch-size", batch_size, 1),
            ("--seq-length", seq_length, 2),
            ("--cpus-per-replica", cpus_per_replica, 1),
            ("--max-samples", max_samples, 1),
            ("--preprocessing-workers", preprocessing_workers, 1),
        ),
        gpu_memory_utilization,
        executor,
    )
    check_part(start, end, shard)
    if (replicas > 1 or address) and importlib.util.find_spec("ray") is None:
        raise ExtractError(
            "More than one replica, and a cluster, need Ray: pip install 'vllm-compat[ray]'. "
            "Without it, run one process for each part of the data, with --shard."
        )
    ahead.check_output(folder)
    ahead.check_model(model)
    ahead.check_layers(model, layer_ids or (), ahead.layer_count(model))
    check_beginning(data)
    settings: dict[str, Any] = {"seq_length": seq_length}
    if layer_ids:
        settings["layer_ids"] = list(layer_ids)
    installed = versions()
    check_folder(folder, {"settings": settings, "versions": dict(installed)}, mixed_versions)
    with vllm_compat.applied(transport=transport, executor=executor):  # type: ignore[arg-type]
        began = time.monotonic()
        layers = tuple(layer_ids) if layer_ids else default_layers(model)
        ahead.check_layers(model, layers, ahead.layer_count(model))
        samples = prepare(
            model,
            data,
            seq_length=seq_length,
            seed=seed,
            max_samples=max_samples,
            cache_dir=cache_dir,
            assistant_pattern=assistant_pattern,
            turn_dropout=turn_dropout,
            workers=preprocessing_workers,
        )
        stream.write(
            f"{len(samples)} samples, {samples.tokens} tokens, prepared by speculators in "
            f"{time.monotonic() - began:.0f} s\n"
        )
        if not samples.trained(seq_length - 1).any():
            raise ExtractError(
                f"No token of {data} would be trained on: the loss masks of all "
                f"{len(samples)} samples are empty. speculators finds no reply of an assistant "
                "in the texts that the chat template makes: --assistant-pattern gives it a "
                "regular expression for them; --seq-length may cut them off."
            )
        frequencies = Path(token_freq_path or folder / FREQUENCIES)
        if token_freq_path is not None and samples.frequencies:
            check_frequencies(samples.frequencies, frequencies)
        job = Job(
            model=model,
            layer_ids=layers,
            seq_length=seq_length,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            executor=executor,  # type: ignore[arg-type]
            transport=transport,  # type: ignore[arg-type]
            cpus=cpus_per_replica,
            identity=model_identity(model),
            versions=tuple(installed),
        )
        facts = {
            "model": {"path": model, "identity": job.identity},
            "data": {
                "path": data,
                "samples": len(samples),
                "tokens": samples.tokens,
                "identity": samples.identity,
            },
            "settings": {
                **settings,
                "layer_ids": list(layers),
                "batch_size": batch_size,
                "tensor_parallel_size": tensor_parallel_size,
                **_cores(cpus_per_replica, replicas, address),
            },
            "versions": dict(installed),
        }
        first, last = part(len(samples), batch_size, start, end, shard)
        if first == last:
            note = (
                f"this part has no batch: {len(samples)} samples are "
                f"{-(-len(samples) // batch_size)} batches of {batch_size}, fewer than parts"
            )
            return Summary(folder, 0, layer_ids=list(layers), notes=[note])
        with Folder(folder, facts, first, last, mixed_versions) as there:
            run = Run(job, samples, there, batch_size, stream, retry_failed)
            if not ignore_free_space:
                ahead.check_space(folder, run.tokens_left * row_bytes(model, layers))
            try:
                with _terminated_like_interrupted():
                    if replicas > 1 or (address and executor == "mp"):
                        run.on_ray(replicas, address)
                    else:
                        run.here(address)
            except BaseException:
                with contextlib.suppress(DiskError):  # there is a reason to tell already
                    run.account()
                raise
            run.account()
            if samples.frequencies:
                keep_frequencies(samples.frequencies, frequencies, token_freq_path is None)
            config = _config(job, data, cache_dir, len(samples), max_samples, seed)
            write_whole(folder / "data_config.json", json.dumps(config, indent=2).encode())
            return run.summary


def _cores(each: int | None, replicas: int, address: str | None) -> dict[str, Any]:
    """Of a replica, on a CPU: with other numbers of threads, sums have other last bits."""
    if not on_cpu():
        return {}
    if each is not None:
        return {"cpus_per_replica": each}
    if address:
        return {"cpus_per_replica": f"the cluster's, shared by {replicas}"}
    there = len(usable_cores())
    if replicas == 1:
        return {"cpus_per_replica": f"all of {there}"}  # vLLM chooses
    return {"cpus_per_replica": max(there // replicas, 1)}


def _config(
    job: Job, data: str, cache_dir: str | None, total: int, max_samples: int | None, seed: int
) -> Any:
    """``data_config.json``, by speculators, which reads no more than this of a generator."""
    from datasets import config as datasets_config
    from speculators.data_generation.config_generator import DataGenerationConfig

    generator = SimpleNamespace(
        model_path=job.model,
        tensor_parallel_size=job.tensor_parallel_size,
        layer_ids=list(job.layer_ids or ()),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(gpu_memory_utilization=job.gpu_memory_utilization)
        ),
    )
    return DataGenerationConfig.from_generator(
        generator=generator,
        train_data_path=data,
        seq_length=job.seq_length,
        cache_dir=str(cache_dir or datasets_config.HF_DATASETS_CACHE),
        num_samples=total,
        max_samples=max_samples,
        seed=seed,
    ).to_dict()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, which batch schedulers send first, stops a run as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
