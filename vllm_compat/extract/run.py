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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

from .. import errors as base
from ..system import usable_cores
from . import errors
from .errors import ExtractError, ReplicaError
from .files import write_whole
from .job import Job, default_layers, model_identity, on_cpu, versions
from .manifest import Folder, Outcome
from .progress import Progress
from .replica import Replica, Writer
from .samples import Samples, prepare

__all__ = ["Summary", "extract"]

_TRIES = 4  # of a batch whose actor dies under it
_STORE = 512 << 20  # bytes of a local Ray's object store, beside the samples


@dataclass
class Summary:
    """What a run did.

    Attributes:
        output: the folder.
        samples: of this run (of its shard).
        there: that were there before.
        written: files written by this run.
        tokens: in those.
        failed: reason by index, of this run's samples.
        missing: samples without a file or a reason; more than none if the run was stopped.
        layer_ids: in the order of the files' states.
        seconds: from the first batch to the last; on Ray, with the start of the replicas.
        notes: what the user should know.
    """

    output: Path
    samples: int
    there: int = 0
    written: int = 0
    tokens: int = 0
    failed: dict[int, str] = field(default_factory=dict)
    missing: int = 0
    layer_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Work:
    """A batch: the samples [start, end), and those of them whose files are missing."""

    start: int
    end: int
    wanted: tuple[int, ...]


# Called with what became of a sample, the replica that did it, its device, and a note.
_Tell = Callable[[Outcome, str, str, str], None]


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
    token_freq_path: str | os.PathLike[str] = "token_freq.pt",
    cache_dir: str | None = None,
    assistant_pattern: str | None = None,
    turn_dropout: bool = False,
    preprocessing_workers: int | None = None,
    retry_failed: bool = False,
    mixed_versions: bool = False,
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
        token_freq_path: where the token frequencies go.
        cache_dir: of Hugging Face datasets.
        assistant_pattern: speculators' regular expression for what is trained on.
        turn_dropout: speculators' random choice of turns.
        preprocessing_workers: processes for the preprocessing.
        retry_failed: try samples again that failed in an earlier run.
        mixed_versions: go on in a folder that was begun with other versions.
        stream: where progress is shown; standard error by default.

    Returns:
        What was done.

    Raises:
        OutputConflictError: the folder belongs to something else.
        DiskError: a file could not be written.
        ReplicaError: generators can't be made, or keep dying.
        VllmCompatError: whatever else :func:`vllm_compat.apply` and the generator say.
        KeyboardInterrupt: stopped by SIGINT or SIGTERM. Whatever it is, what was written stays,
            and the same call goes on from there.
    """
    import vllm_compat

    stream = stream or sys.stderr
    _check(replicas, tensor_parallel_size, batch_size, seq_length, executor)
    if (replicas > 1 or address) and importlib.util.find_spec("ray") is None:
        raise ExtractError(
            "More than one replica, and a cluster, need Ray: pip install 'vllm-compat[ray]'. "
            "Without it, run one process for each part of the data, with --shard."
        )
    with vllm_compat.applied(transport=transport, executor=executor):  # type: ignore[arg-type]
        began = time.monotonic()
        samples = prepare(
            model,
            data,
            seq_length=seq_length,
            seed=seed,
            max_samples=max_samples,
            token_freq_path=Path(token_freq_path),
            cache_dir=cache_dir,
            assistant_pattern=assistant_pattern,
            turn_dropout=turn_dropout,
            workers=preprocessing_workers,
        )
        stream.write(
            f"{len(samples)} samples, {samples.tokens} tokens, prepared by speculators in "
            f"{time.monotonic() - began:.0f} s\n"
        )
        layers = tuple(layer_ids) if layer_ids else default_layers(model)
        installed = versions()
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
                "layer_ids": list(layers),
                "seq_length": seq_length,
                "batch_size": batch_size,
                "tensor_parallel_size": tensor_parallel_size,
                **_cores(cpus_per_replica, replicas, address),
            },
            "versions": dict(installed),
        }
        first, last = _part(len(samples), batch_size, start, end, shard)
        folder = Path(output).absolute()
        with Folder(folder, facts, first, last, mixed_versions) as there:
            run = _Run(job, samples, there, batch_size, stream, retry_failed)
            try:
                with _terminated_like_interrupted():
                    if replicas > 1 or (address and executor == "mp"):
                        run.on_ray(replicas, address)
                    else:
                        run.here(address)
            except BaseException:
                with contextlib.suppress(errors.DiskError):  # there is a reason to tell already
                    run.account()
                raise
            run.account()
            config = _config(job, data, cache_dir, len(samples), max_samples, seed)
            write_whole(folder / "data_config.json", json.dumps(config, indent=2).encode())
            return run.summary


class _Run:
    """One run over one part of the samples."""

    def __init__(
        self,
        job: Job,
        samples: Samples,
        there: Folder,
        batch_size: int,
        stream: TextIO,
        retry_failed: bool,
    ) -> None:
        self.job, self.samples, self.there, self.stream = job, samples, there, stream
        lengths = [
            min(samples.length(index), job.seq_length - 1) for index in range(len(samples))
        ]
        found = there.scan(lengths, retry_failed)
        self.batches = list(_batches(there.start, there.end, len(samples), batch_size, found))
        self.done = set(found)
        self.summary = Summary(
            there.path,
            samples=there.end - there.start,
            there=sum(o.status == "written" for o in found.values()),
            failed={i: o.reason for i, o in found.items() if o.status == "failed"},
            layer_ids=list(job.layer_ids or ()),
        )
        self.devices: set[str] = set()
        if found:
            stream.write(f"{len(found)} of {self.summary.samples} samples are done already\n")

    @property
    def left(self) -> list[_Work]:
        """Batches with samples that are not done."""
        rest = (
            _Work(b.start, b.end, tuple(i for i in b.wanted if i not in self.done))
            for b in self.batches
        )
        return [b for b in rest if b.wanted]

    def here(self, address: str | None) -> None:
        """With one generator in this process."""
        if not self.batches:
            return
        with contextlib.ExitStack() as stack:
            if self.job.executor == "ray":
                from .cluster import connection

                stack.enter_context(connection(address))
            self._here()

    def _here(self) -> None:
        replica, writer = Replica(self.job), Writer(self.there.path)
        pending: deque[list[Any]] = deque()

        def settle(waiting: int) -> None:
            while len(pending) > waiting:
                outcomes = [future.result() for future in pending.popleft()]
                writer.durable()
                for outcome in outcomes:
                    self._tell(outcome, "", replica.device, "")

        try:
            replica.start()
            self._look_at_capacity(replica)
            with self._progress():
                for batch in self.left:
                    chunk = [self.samples.sample(i) for i in range(batch.start, batch.end)]
                    results = replica.states([ids for ids, _ in chunk])
                    places = [i - batch.start for i in batch.wanted]
                    pending.append(
                        writer.submit(
                            batch.wanted,
                            [results[p] for p in places],
                            [chunk[p][1] for p in places],
                        )
                    )
                    del results
                    settle(1)
                settle(0)
        finally:
            writer.close()
            # Stopped in the middle: what is written is written.
            for future in (f for futures in pending for f in futures):
                if future.done() and future.exception() is None:
                    self._tell(future.result(), "", replica.device, "")
            self.summary.notes += replica.notes
            replica.close()

    def on_ray(self, replicas: int, address: str | None) -> None:
        """With as many generators as there are replicas, on Ray Data."""
        if not self.batches:
            return
        from .cluster import Cluster

        with Cluster(self.job, replicas, address, _STORE + 2 * self.samples.tokens * 5) as ray:
            self.summary.notes += ray.notes
            with self._progress():
                while self.left:
                    before = len(self.done)
                    trouble = ray.compute(self._tables(), self.there.path, _TRIES, self._row)
                    if len(self.done) == before:
                        raise ReplicaError(
                            f"{len(self.left)} batches are left, and their replicas die: "
                            f"{trouble or 'Ray does not say why'}"
                        )

    def account(self) -> None:
        """Adds up, and writes down what there is."""
        self.summary.missing = self.summary.samples - len(self.done)
        self.there.finish(len(self.samples), self.devices)

    # -- inside ----------------------------------------------------------------------------

    def _tables(self) -> Iterator[Any]:
        """A table of Arrow for each batch that is left."""
        import numpy
        import pyarrow

        for batch in self.left:
            low = self.samples.starts[batch.start]
            high = self.samples.starts[batch.end]
            offsets = self.samples.starts[batch.start : batch.end + 1] - low
            indices = numpy.arange(batch.start, batch.end)
            columns = {
                "index": indices,
                "wanted": numpy.isin(indices, batch.wanted),
            }
            for name, values, dtype in (
                ("input_ids", self.samples.ids, numpy.int32),
                ("loss_mask", self.samples.mask, numpy.int8),
            ):
                columns[name] = pyarrow.ListArray.from_arrays(
                    offsets.astype(numpy.int32), values[low:high].astype(dtype)
                )
            yield pyarrow.table(columns)

    def _row(self, row: dict[str, Any]) -> None:
        if row["status"] == "stopped":
            raise _error_class(row["kind"])(row["reason"])
        numbers = (int(row["tokens"]), int(row["nbytes"]))
        outcome = Outcome(int(row["index"]), row["status"], *numbers, row["reason"])
        self._tell(outcome, row["replica"], row["device"], row["note"])

    def _tell(self, outcome: Outcome, replica: str, device: str, note: str) -> None:
        if outcome.index in self.done:
            return
        self.done.add(outcome.index)
        self.there.note([outcome])
        if outcome.status == "failed":
            self.summary.failed[outcome.index] = outcome.reason
        else:
            self.summary.written += 1
            self.summary.tokens += outcome.tokens
        if device:
            self.devices.add(device)
        if note and note not in self.summary.notes:
            self.summary.notes.append(note)
        if self._shown is not None:
            self._shown.add(outcome.tokens, outcome.status == "failed", replica)

    _shown: Progress | None = None

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        began = time.monotonic()
        self._shown = Progress(self.stream, len(self.done), self.summary.samples)
        try:
            yield
        finally:
            self._shown.close()
            self._shown = None
            self.summary.seconds = time.monotonic() - began

    def _look_at_capacity(self, replica: Replica) -> None:
        largest = max(
            (int(self.samples.starts[b.end] - self.samples.starts[b.start]) for b in self.left),
            default=0,
        )
        if 0 < replica.capacity < largest:
            self.summary.notes.append(
                f"the KV cache holds {replica.capacity} tokens and the largest batch has "
                f"{largest}: on a device with another amount of memory it would be computed in "
                "other steps, and the last bits could differ; a smaller --batch-size avoids it"
            )


def _check(
    replicas: int, tensor_parallel_size: int, batch_size: int, seq_length: int, executor: str
) -> None:
    for name, value, least in (
        ("--replicas", replicas, 1),
        ("--tensor-parallel-size", tensor_parallel_size, 1),
        ("--batch-size", batch_size, 1),
        ("--seq-length", seq_length, 2),
    ):
        if value < least:
            raise ExtractError(f"{name} {value}: at least {least} is needed.")
    if executor not in ("mp", "ray"):
        raise ExtractError(f"--executor {executor}: mp or ray is possible.")


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


def _error_class(name: str) -> type[base.VllmCompatError]:
    """The class of an error that came from an actor."""
    found = getattr(errors, name, None) or getattr(base, name, None)
    return found if isinstance(found, type) else ReplicaError


def _part(
    total: int,
    batch_size: int,
    start: int | None,
    end: int | None,
    shard: tuple[int, int] | None,
) -> tuple[int, int]:
    """The samples of this run."""
    if shard is not None:
        if start is not None or end is not None:
            raise ExtractError("--shard can't be given together with --start or --end.")
        part, parts = shard
        if not 0 <= part < parts:
            raise ExtractError(f"--shard {part}/{parts}: the first of {parts} is 0/{parts}.")
        batches = -(-total // batch_size)
        # Whole batches: none is computed by two shards.
        low, high = (batches * p // parts * batch_size for p in (part, part + 1))
        low, high = min(low, total), min(high, total)
    else:
        low, high = start or 0, total if end is None else min(end, total)
        if not 0 <= low < high:
            raise ExtractError(
                f"--start {low} --end {high}: there are samples 0 to {total - 1}."
            )
    if low == high:
        raise ExtractError(f"There are fewer batches than shards; shard {shard} has none.")
    return low, high


def _batches(
    start: int, end: int, total: int, batch_size: int, found: dict[int, Outcome]
) -> Iterator[_Work]:
    for first in range(start // batch_size * batch_size, end, batch_size):
        last = min(first + batch_size, total)
        wanted = tuple(i for i in range(max(first, start), min(last, end)) if i not in found)
        if wanted:
            yield _Work(first, last, wanted)


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
