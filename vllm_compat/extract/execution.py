"""One run over one part of the samples: computed here or on Ray, and accounted for."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from .. import errors as base
from . import errors
from .errors import ReplicaError
from .job import Job
from .manifest import Folder, Outcome
from .plan import Work, batches
from .progress import Progress
from .replica import Replica, Writer
from .samples import Samples

__all__ = ["Run", "Summary"]

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
        unused: rows of the data that speculators made no sample of.
        unused_names: the first of those rows, and why.
        untrained: this run's samples with a loss mask of zeros alone, by index.
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
    unused: int = 0
    unused_names: list[str] = field(default_factory=list)
    untrained: list[int] = field(default_factory=list)
    missing: int = 0
    layer_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


class Run:
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
        trained = samples.trained(job.seq_length - 1)
        self._untrained = [i for i, count in enumerate(trained) if not count]
        self.batches = list(batches(there.start, there.end, len(samples), batch_size, found))
        self.done = set(found)
        self.summary = Summary(
            there.path,
            samples=there.end - there.start,
            there=sum(o.status == "written" for o in found.values()),
            failed={i: o.reason for i, o in found.items() if o.status == "failed"},
            unused=samples.unused,
            unused_names=list(samples.unused_names),
            layer_ids=list(job.layer_ids or ()),
            notes=list(there.notes),
        )
        self.devices: set[str] = set()
        if found:
            stream.write(f"{len(found)} of {self.summary.samples} samples are done already\n")

    @property
    def left(self) -> list[Work]:
        """Batches with samples that are not done."""
        rest = (
            Work(b.start, b.end, tuple(i for i in b.wanted if i not in self.done))
            for b in self.batches
        )
        return [b for b in rest if b.wanted]

    @property
    def tokens_left(self) -> int:
        """Of the samples whose files are missing."""
        most = self.job.seq_length - 1
        return sum(min(self.samples.length(i), most) for b in self.left for i in b.wanted)

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
        self.summary.untrained = [
            i
            for i in self._untrained
            if self.there.start <= i < self.there.end and i not in self.summary.failed
        ]
        self.summary.missing = self.summary.samples - len(self.done)
        also = {
            "untrained": self._untrained,
            "unused": {
                "rows": self.samples.unused,
                "first": list(self.samples.unused_names),
            },
        }
        self.there.finish(len(self.samples), self.devices, also)

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


def _error_class(name: str) -> type[base.VllmCompatError]:
    """The class of an error that came from an actor."""
    found = getattr(errors, name, None) or getattr(base, name, None)
    return found if isinstance(found, type) else ReplicaError
