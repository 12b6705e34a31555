"""Drives one vLLM executor and its scheduler through whole batches.

Every call into the executor is made by one thread of its own. The user's thread only waits
for it, and can be interrupted while it waits: the reply of an interrupted RPC is still
taken, so that the next call never gets the answer of an earlier one.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from .batch import Batch
from .errors import CaptureError, EngineDeadError, UnsupportedModelError
from .transport.messages import Closed
from .transport.shared import Offer, Ring, Unavailable

__all__ = ["Engine"]

log = logging.getLogger("vllm_compat")

T = TypeVar("T")

_RING_LIMITS = (16 << 20, 512 << 20)
_CAPTURING_RANK = 0  # all tensor-parallel ranks hold the same rows; the first sends
_LAST_ROWS = 600.0  # seconds; a GPU may still compute when the last step's reply is here


class Engine:
    """A vLLM executor with capture.

    Args:
        build: makes vLLM's executor and starts its workers.
        vllm_config: the configuration of both.
    """

    def __init__(self, build: Callable[[], Any], vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.scheduler: Any = None
        self.description: dict[str, Any] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-compat-engine")
        self._ring: Ring | None = None
        self._step = 0
        self._dead: str | None = None
        self._bare_reply = self._two_phase = False
        self._closed = False
        self.executor = build()

    # -- calls into the executor ---------------------------------------------------------

    def rpc(self, method: str, *args: Any, rank: int | None = None, **kwargs: Any) -> Any:
        """``collective_rpc``, from the engine's thread.

        Args:
            method: name of a worker's method.
            rank: the only worker whose reply is wanted; None for a list of all.

        Raises:
            EngineDeadError: a worker is gone.
        """
        return self.run(self._rpc, method, args, rank, kwargs)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs something in the engine's thread and waits for it."""
        self.check_alive()
        future: Future[T] = self._thread.submit(function, *args)
        return future.result()

    def _rpc(self, method: str, args: tuple[Any, ...], rank: int | None, kwargs: Any) -> Any:
        rpc = self.executor.collective_rpc
        try:
            if rank is None:
                return rpc(method, args=args, kwargs=kwargs)
            if "unique_reply_rank" not in inspect.signature(rpc).parameters:
                return rpc(method, args=args, kwargs=kwargs)[rank]  # Ray's executor
            reply = rpc(method, args=args, kwargs=kwargs, unique_reply_rank=rank)
            return reply if self._bare_reply else reply[0]
        except BaseException as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def answers(self, bare_reply: bool, two_phase: bool) -> None:
        """Says how this vLLM behaves.

        Args:
            bare_reply: ``collective_rpc(unique_reply_rank=r)`` gives the reply of that rank
                itself, not a list of one.
            two_phase: ``execute_model`` keeps its batch until ``sample_tokens``.
        """
        self._bare_reply, self._two_phase = bare_reply, two_phase

    # -- set-up --------------------------------------------------------------------------

    def set_up(self, layer_ids: list[int], transport: str) -> None:
        """Hooks the model in every worker and opens the way for the rows.

        Raises:
            UnsupportedModelError: the workers refuse the model.
        """
        layers = sorted(set(layer_ids))
        self.description = self.rpc("vllm_compat_setup", layers)[0]
        reason = "transport 'rpc' was asked for"
        if transport != "rpc":
            try:
                self._ring = Ring(self._ring_size(len(layers)))
                reason = self._open(self._ring.offer)
                self._ring.opened()
            except (Unavailable, OSError) as error:
                reason = str(error)
            if not reason:
                return
            if self._ring is not None:
                self._ring.close()
                self._ring = None
            if transport == "shared":
                raise CaptureError(f"Workers can't share memory with this process: {reason}.")
        log.info("vllm-compat: rows travel with vLLM's own replies (%s).", reason)
        self._open(None)

    def initialize(self, kv_cache_configs: list[Any]) -> None:
        """Allocates the KV cache; one config for each worker."""
        self.run(self.executor.initialize_from_config, kv_cache_configs)

    def _open(self, offer: Offer | None) -> str:
        return "; ".join(sorted({r for r in self.rpc("vllm_compat_open", offer) if r}))

    def _ring_size(self, layers: int) -> int:
        """Bytes for two scheduler steps at most: one being read, one being computed."""
        from torch import bfloat16

        tokens = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        row = int(self.description["hidden_size"]) * bfloat16.itemsize
        low, high = _RING_LIMITS
        size = min(max(2 * tokens * layers * row, low), high)
        return -(-size // 4096) * 4096

    # -- batches -------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """Number of the next scheduler step; counts on over all batches, so that what an
        abandoned batch left behind in the ring can't pass for a row of the next one."""
        return self._step + 1

    def compute(self, batch: Batch, scheduler_output: Any) -> None:
        """Runs all scheduler steps that a batch needs, and waits for its rows.

        Args:
            batch: its requests are in the scheduler already.
            scheduler_output: of the first step.

        Raises:
            CaptureError: a request can't be scheduled, or a row is not as promised.
            EngineDeadError: a worker is gone.
        """
        self.check_alive()
        stop = threading.Event()
        reader = None
        if self._ring is not None:
            reader = threading.Thread(
                target=_read,
                args=(self._ring, batch, stop),
                name="vllm-compat-reader",
                daemon=True,
            )
            reader.start()
        future = self._thread.submit(self._compute, batch, scheduler_output)
        try:
            future.result()
            self._await_rows(batch)
        except BaseException as error:
            batch.cancelled = True
            batch.fail(error)
            # The reply of a step that still runs belongs to nobody else; and the reader
            # must go on reading, or a worker with a full ring would never reply.
            try:
                with contextlib.suppress(Exception):
                    future.result()
            except BaseException:  # interrupted once more
                self._dead = self._dead or "a scheduler step was interrupted twice"
                raise
            raise
        finally:
            stop.set()
            if reader is not None:
                reader.join()

    def _await_rows(self, batch: Batch) -> None:
        deadline = time.monotonic() + _LAST_ROWS
        while not batch.wait(1.0):
            self.check_alive()
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"The last rows did not come within {_LAST_ROWS:.0f} s. "
                    f"{_first_gap(batch)}"
                )

    def _compute(self, batch: Batch, scheduler_output: Any) -> None:
        pending = set(batch.request_ids)
        while not batch.cancelled:
            if not scheduler_output.total_num_scheduled_tokens:
                raise CaptureError(_starved(batch, pending, self.vllm_config))
            self._step += 1
            arguments = (scheduler_output, self._step, self._two_phase)
            messages = self._rpc("vllm_compat_step", arguments, _CAPTURING_RANK, {})
            for message in messages or ():
                batch.receive(message, message.payload)
            done = self._prefilled(scheduler_output, pending)
            self._finish(done)
            pending.difference_update(done)
            if not pending:
                return
            if batch.failed:
                batch.wait()
            scheduler_output = self.scheduler.schedule()

    def _prefilled(self, scheduler_output: Any, pending: set[str]) -> list[str]:
        requests = self.scheduler.requests
        return [
            request_id
            for request_id in scheduler_output.num_scheduled_tokens
            if request_id in pending
            and requests[request_id].num_computed_tokens
            >= requests[request_id].num_prompt_tokens
        ]

    def _finish(self, request_ids: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        if request_ids:
            self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def abandon(self, batch: Batch) -> None:
        """Takes a failed batch's requests out of the scheduler; waits for a running step."""
        batch.cancelled = True
        if self.dead:
            return
        with contextlib.suppress(Exception):
            self.run(self._finish, [r for r in batch.request_ids if r in self.scheduler.requests])

    # -- life and death ------------------------------------------------------------------

    @property
    def dead(self) -> str | None:
        """Why it can't be used any more, or None."""
        return self._dead

    def check_alive(self) -> None:
        """Raises EngineDeadError if a worker is gone."""
        if self._dead is None and not self._closed and (gone := self._gone()):
            self._dead = gone
        if self._dead is not None:
            raise EngineDeadError(
                f"This generator is dead: {self._dead}. Make a new one to go on."
            )

    def _gone(self) -> str | None:
        for worker in getattr(self.executor, "workers", None) or ():
            process = getattr(worker, "proc", None)
            if process is not None and not process.is_alive():
                code = process.exitcode
                how = f"signal {-code}" if code is not None and code < 0 else f"exit {code}"
                return f"worker {process.name} (pid {process.pid}) ended with {how}"
        if getattr(self.executor, "is_failed", False):
            return "vLLM's executor reports that it failed"
        return None

    def _explained(self, error: BaseException) -> BaseException:
        """What an error of the executor means."""
        if not isinstance(error, Exception):
            return error
        _settle(self.executor)
        gone = self._gone()
        if gone:
            self._dead = gone
            return EngineDeadError(f"{gone}; last error: {error}")
        text = str(error)
        if "vllm-compat" in text or "its states would be a guess" in text:
            return UnsupportedModelError(text)
        return CaptureError(f"vLLM failed: {text}")

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._dead = self._dead or "it was shut down"
        with contextlib.suppress(Exception):
            self.executor.shutdown()
        self._thread.shutdown(wait=False)
        if self._ring is not None:
            self._ring.close()
            self._ring = None


def _read(ring: Ring, batch: Batch, stop: threading.Event) -> None:
    """Takes rows out of the ring until the batch has all of them, or ``stop`` is set."""
    try:
        while not (batch.complete or stop.is_set()):
            for message in ring.channel.read(timeout=0.2):
                try:
                    if not batch.failed:
                        batch.receive(message, ring.block(message) if message.nbytes else None)
                except Exception as error:
                    batch.fail(error)
                finally:
                    if message.nbytes:
                        ring.credit()
    except Closed:
        batch.fail(EngineDeadError("The worker that sends the rows has gone."))
    except BaseException as error:
        batch.fail(error)


def _settle(executor: Any) -> None:
    """Gives a dying worker a moment to be seen as dead: its pipe breaks before it ends."""
    for worker in getattr(executor, "workers", None) or ():
        process = getattr(worker, "proc", None)
        if process is not None:
            process.join(timeout=0.2)


def _starved(batch: Batch, pending: set[str], vllm_config: Any) -> str:
    index = min(batch.sequence(request_id) for request_id in pending)
    blocks = vllm_config.cache_config.num_gpu_blocks
    return (
        f"Sequence {index} ({len(batch.prompts[index])} tokens) can't be scheduled: the KV "
        f"cache of {blocks} blocks has no room for it. Raise gpu_memory_utilization (on a "
        "CPU: VLLM_CPU_KVCACHE_SPACE) or lower max_model_len."
    )


def _first_gap(batch: Batch) -> str:
    for index in range(len(batch.prompts)):
        try:
            batch.result(index)
        except CaptureError as gap:
            return str(gap)
    return ""


@contextlib.contextmanager
def process_settings_kept() -> Iterator[None]:
    """Undoes what starting workers changes in this process.

    vLLM's multiprocess executor sets OMP_NUM_THREADS=1 and torch's thread count for itself
    (set_multiprocessing_worker_envs), and the CPU platform writes a dozen variables
    (vllm/platforms/cpu.py): meant for a process of vLLM's own, here it is the user's.
    """
    import torch

    before, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
