"""Replicas as actors of Ray Data: ``dataset.map_batches(HiddenStates, ...)``.

    dataset.map_batches(
        HiddenStates,
        fn_constructor_kwargs={"model": MODEL, "layer_ids": [2, 16, 29]},
        batch_size=8, num_gpus=1, compute=ray.data.ActorPoolStrategy(size=8),
    )

Each actor makes one generator on the devices that Ray gives it: GPUs through
``CUDA_VISIBLE_DEVICES``, as ever; of the CPU's cores as many as ``num_cpus`` says, which other
actors on the machine then don't take. Ray itself is imported inside an actor only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from ..errors import VllmCompatError
from .job import Job
from .replica import Failure, Replica, Writer

__all__ = ["HiddenStates", "StateFiles"]

Batch = dict[str, Any]


class HiddenStates:
    """Adds the hidden states to rows of token ids, for ``map_batches``.

    A row needs the column ``input_ids``. Added are ``hidden_states``, an array [layers, tokens,
    hidden] of float32 (exact: the model's bfloat16 widened) or of the bits of the model's
    dtype, and ``error``, empty or why there are no states (then ``hidden_states`` is
    [layers, 0, 0]). The generator cuts samples after ``max_model_len - 1`` tokens;
    ``input_ids`` are cut too.

    Args:
        model: checkpoint, a folder or a name on the hub.
        layer_ids: layers, in the order in which they are wanted; None: the generator's choice.
        max_model_len: tokens of a sample, and one more.
        tensor_parallel_size: GPUs of one generator; say the same as ``num_gpus``.
        gpu_memory_utilization: the generator's argument.
        bits: states as uint16, the bits of bfloat16, in half the memory.
            ``torch.from_numpy(x).view(torch.bfloat16)`` makes them states again.

    Raises:
        VllmCompatError: in the actor's constructor: the generator can't be made.
    """

    def __init__(
        self,
        model: str,
        layer_ids: list[int] | None = None,
        max_model_len: int = 2048,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.8,
        bits: bool = False,
    ) -> None:
        layers = None if layer_ids is None else tuple(layer_ids)
        job = Job(model, layers, max_model_len, tensor_parallel_size, gpu_memory_utilization)
        self._bits = bits
        self._replica = Replica(_with_own_cores(job), alone=True)
        self._replica.start()

    def __del__(self) -> None:
        # Ray Data's way to tell an actor that it is to go.
        if hasattr(self, "_replica"):
            self._replica.close()

    def __call__(self, batch: Batch) -> Batch:
        import torch

        results = self._replica.states(list(batch["input_ids"]))
        states: list[Any] = []
        errors: list[str] = []
        ids: list[Any] = []
        for prompt, result in zip(batch["input_ids"], results, strict=True):
            if isinstance(result, Failure):
                dtype = numpy.uint16 if self._bits else numpy.float32
                states.append(numpy.empty((len(self._replica.layer_ids), 0, 0), dtype))
                errors.append(result.reason)
                ids.append(numpy.asarray(prompt, dtype=numpy.int64))
                continue
            stacked = torch.stack(result["hidden_states"])
            if self._bits:
                states.append(stacked.view(torch.int16).numpy().view(numpy.uint16))
            else:
                states.append(stacked.float().numpy())
            errors.append("")
            ids.append(result["input_ids"].numpy())
        return {
            **batch,
            "input_ids": _objects(ids),
            "hidden_states": _objects(states),
            "error": numpy.array(errors, dtype=object),
        }


class StateFiles:
    """Writes rows of token ids and loss masks as ``data_{i}.pt``, for ``map_batches``.

    A row needs the columns ``index`` (i), ``input_ids`` and ``loss_mask``. What comes out is a
    row for each: ``index``, ``status`` (``written``, ``failed``; ``stopped`` if no file can be
    written any more or no generator be made), ``tokens``, ``nbytes``, ``reason``, ``kind`` (of
    the error that stopped it), ``replica``, ``device`` and ``note``. A row comes out when its
    file is on the disk. Files are written while the next batch computes, if the actor may hold
    two batches: ``max_concurrency=2``.

    Args:
        job: how to make the generator.
        output: an existing folder, the same for all actors.
    """

    def __init__(self, job: Job, output: str) -> None:
        self._replica = Replica(_with_own_cores(job), alone=True)
        self._writer = Writer(Path(output))
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="vllm-compat-replica")
        self._stopped: VllmCompatError | None = None
        self._name = f"{os.uname().nodename}:{os.getpid()}"
        logging.getLogger("speculators").setLevel(logging.WARNING)
        # Not raised: as a row the sentence reaches the user, without Ray trying again.
        try:
            self._replica.start()
        except VllmCompatError as error:
            self._stopped = error

    def __del__(self) -> None:
        # Ray Data's way to tell an actor that it is to go.
        if hasattr(self, "_replica"):
            self._replica.close()

    async def __call__(self, batch: Batch) -> AsyncIterator[Batch]:
        yield await self._batch(batch)

    async def _batch(self, batch: Batch) -> Batch:
        loop = asyncio.get_running_loop()
        indices = [int(i) for i in batch["index"]]
        # All rows are computed, so that the batch is the same in every run; some have files.
        wanted = batch.get("wanted", [True] * len(indices))
        try:
            if self._stopped is not None:
                raise self._stopped
            results = await loop.run_in_executor(
                self._engine, self._replica.states, list(batch["input_ids"])
            )
            chosen = [place for place, want in enumerate(wanted) if want]
            futures = self._writer.submit(
                [indices[p] for p in chosen],
                [results[p] for p in chosen],
                [batch["loss_mask"][p] for p in chosen],
            )
            del results
            outcomes = await asyncio.gather(*map(asyncio.wrap_future, futures))
            await loop.run_in_executor(None, self._writer.durable)
        except VllmCompatError as error:
            self._stopped = error
            return self._rows(
                [(i, "stopped", 0, 0, str(error)) for i in indices], type(error).__name__
            )
        return self._rows([(o.index, o.status, o.tokens, o.nbytes, o.reason) for o in outcomes])

    def _rows(self, rows: list[tuple[int, str, int, int, str]], kind: str = "") -> Batch:
        index, status, tokens, nbytes, reason = zip(*rows, strict=True)
        notes = "; ".join(self._replica.notes)
        return {
            "index": numpy.array(index, dtype=numpy.int64),
            "status": numpy.array(status, dtype=object),
            "tokens": numpy.array(tokens, dtype=numpy.int64),
            "nbytes": numpy.array(nbytes, dtype=numpy.int64),
            "reason": numpy.array(reason, dtype=object),
            "kind": numpy.array([kind] * len(rows), dtype=object),
            "replica": numpy.array([self._name] * len(rows), dtype=object),
            "device": numpy.array([self._replica.device] * len(rows), dtype=object),
            "note": numpy.array([notes] * len(rows), dtype=object),
        }


def _objects(arrays: list[Any]) -> Any:
    column: Any = numpy.empty(len(arrays), dtype=object)
    for place, array in enumerate(arrays):
        column[place] = array
    return column


def _with_own_cores(job: Job) -> Job:
    """Cores as Ray counts them for this actor, on a CPU."""
    if job.cpus is not None:
        return job
    import ray
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return job
    assigned = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    return replace(job, cpus=max(1, int(assigned)))
