"""Drives one vLLM executor and its scheduler through whole batches.

Every call into the executor and the scheduler is made by one thread of its own. The user's
thread only waits for it, and can be interrupted at any moment: what runs there goes on to
its end, and whatever is to be cleaned up comes after it. So a scheduler is never left half
way, and the next call never gets the answer of an earlier one.

A second thread takes the rows out of the ring, as long as the engine lives: a worker that
has rows to send never waits for a batch that nobody wants any more.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from . import shm
from .arena import Arena, Copier
from .batch import Batch
from .errors import (
    CaptureError,
    EngineDeadError,
    UnsupportedEnvironmentError,
    UnsupportedModelError,
    VllmCompatError,
)
from .features import Features
from .on_ray import RayResources, actor_death
from .transport.messages import Closed, Kind, Message
from .transport.shared import Offer, Ring, Unavailable

__all__ = ["Engine"]

log = logging.getLogger("vllm_compat")

T = TypeVar("T")

_RING_LIMITS = (16 << 20, 512 << 20)
_CAPTURING_RANK = 0  # all tensor-parallel ranks hold the same rows; the first sends
_LAST_ROWS = 600.0  # seconds; a GPU may still compute when the last step's reply is here
_UNKNOWN = 255  # exit status of a worker, where another has collected it
_DEPARTURE = 10.0  # seconds for workers to end that were told to
_PULSE = 0.25  # seconds between two looks at the workers while one waits for them


class Engine:
    """A vLLM executor with capture.

    Args:
        build: makes vLLM's executor and starts its workers.
        vllm_config: the configuration of both.
        features: of this vLLM.
    """

    def __init__(self, build: Callable[[], Any], vllm_config: Any, features: Features) -> None:
        self.vllm_config = vllm_config
        self.scheduler: Any = None
        self.description: dict[str, Any] = {}
        self.recurrent = False  # a state goes from token to token, beside attention
        self.arena, self.copier = Arena(), Copier()
        self._caller = _Caller()
        self._reader: _Reader | None = None
        self._step = 0
        self._untold: set[str] = set()
        self._dead: str | None = None
        self._features = features
        self._closed = False
        self._pid = os.getpid()
        self._on_ray = RayResources(vllm_config)
        try:
            self.executor = build()
        except BaseException:
            self._on_ray.release(None)
            raise
        # Kept here: vLLM's executors may drop theirs when they shut down.
        self._processes = [
            process
            for worker in getattr(self.executor, "workers", None) or ()
            if (process := getattr(worker, "proc", None)) is not None
        ]
        # While all modules are whole still, and before multiprocessing ends its children.
        atexit.register(self.close)
        _ENGINES.add(self)

    @property
    def worker_pids(self) -> list[int]:
        """Of the workers that are processes of this machine (not those of Ray)."""
        return [process.pid for process in self._processes]

    # -- calls into the executor ---------------------------------------------------------

    def rpc(self, method: Any, *args: Any, rank: int | None = None, **kwargs: Any) -> Any:
        """``collective_rpc``, from the engine's thread.

        Args:
            method: name of a worker's method, or a function of the worker.
            rank: the only worker whose reply is wanted; None for a list of all.

        Raises:
            EngineDeadError: a worker is gone.
            CaptureError: a worker raised an exception; the message has its text.
        """
        return self.run(self._rpc, method, args, rank, kwargs)

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Runs something in the engine's thread and waits for it."""
        self.check_alive()
        return self._result(self._caller.submit(function, *args))

    def _result(self, future: futures.Future[T]) -> T:
        while not future.done():
            futures.wait([future], timeout=_PULSE)
            if not future.done():
                # vLLM waits for workers to end before it gives up a call to them.
                self.check_alive()
        return future.result()

    def _rpc(
        self,
        method: Any,
        args: tuple[Any, ...],
        rank: int | None,
        kwargs: Any,
        timeout: float | None = None,
    ) -> Any:
        rpc = self.executor.collective_rpc
        keywords: dict[str, Any] = {"args": args, "kwargs": kwargs}
        if timeout is not None:
            keywords["timeout"] = timeout
        try:
            if rank is None:
                return rpc(method, **keywords)
            if "unique_reply_rank" not in inspect.signature(rpc).parameters:
                return rpc(method, **keywords)[rank]  # Ray's executor
            reply = rpc(method, unique_reply_rank=rank, **keywords)
            return reply if self._features.bare_reply else reply[0]
        except Exception as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    # -- set-up --------------------------------------------------------------------------

    def set_up(self, layer_ids: list[int], transport: str) -> None:
        """Hooks the model in every worker and opens the way for the rows.

        Raises:
            UnsupportedModelError: the workers refuse the model.
        """
        layers = sorted(set(layer_ids))
        replies = self.rpc("vllm_compat_setup", layers)
        for reply in replies:
            if "refused" in reply:
                raise UnsupportedModelError(reply["refused"])
            _check_same(reply)
        self.description = replies[0]
        if rope := self.description.get("rope"):
            log.warning("vllm-compat: %s", rope["note"])
        reason = "transport 'rpc' was asked for"
        if transport != "rpc":
            reason = self._share(len(layers))
            if not reason:
                return
            if transport == "shared":
                raise CaptureError(f"Workers can't share memory with this process: {reason}.")
        log.info("vllm-compat: rows travel with vLLM's own replies (%s).", reason)
        if self._processes:
            _warn_of_small_shm()
        self._open(None)

    def _share(self, layers: int) -> str:
        """Opens a ring between the worker and this process; says why not, if it can't."""
        size = self._ring_size(layers)
        try:
            try:
                ring = Ring(size)
            except Unavailable as why:
                log.info("vllm-compat: no memory of %d bytes to share (%s).", size, why)
                ring = Ring(_RING_LIMITS[0])  # slower; the worker waits more
        except Unavailable as why:
            return str(why)
        log.info("vllm-compat: rows travel through %d bytes (%s).", ring.size, ring.kind)
        reason = "the workers could not be asked"
        try:
            reason = self._open(ring.offer)
            ring.opened()
        finally:
            if reason:
                ring.close()
        if not reason:
            self._reader = _Reader(ring)
        return reason

    def initialize(self, kv_cache_configs: list[Any]) -> None:
        """Allocates the KV cache; one config for each worker.

        Raises:
            UnsupportedModelError: a worker keeps states in a form that isn't known.
        """
        self.run(self.executor.initialize_from_config, kv_cache_configs)
        for reply in self.rpc("vllm_compat_know_blocks"):
            if "refused" in reply:
                raise UnsupportedModelError(reply["refused"])
            self.recurrent = bool(reply["recurrent"])

    def _open(self, offer: Offer | None) -> str:
        return "; ".join(sorted({r for r in self.rpc("vllm_compat_open", offer) if r}))

    def _ring_size(self, layers: int) -> int:
        """Bytes for two scheduler steps at most: one being read, one being computed."""
        from torch import bfloat16

        tokens = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
        row = int(self.description["hidden_size"]) * int(bfloat16.itemsize)
        low, high = _RING_LIMITS
        size = min(max(2 * tokens * layers * row, low), high)
        return -(-size // 4096) * 4096

    # -- batches -------------------------------------------------------------------------

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
        future = self._caller.submit(self._compute, batch, scheduler_output)
        try:
            while not future.done():
                futures.wait([future], timeout=_PULSE)
                batch.wait(0)  # raises what the reader found: no need to wait for the step
                if not future.done():
                    self.check_alive()
            future.result()
            self._await_rows(batch)
        except EngineDeadError:
            self.check_alive()  # says more, if it was the reader who noticed
            raise
        if self._reader is not None:
            self._reader.serve(None)

    def _await_rows(self, batch: Batch) -> None:
        deadline = time.monotonic() + _LAST_ROWS
        while not batch.wait(_PULSE):
            self.check_alive()
            if time.monotonic() > deadline:
                raise CaptureError(
                    f"The last rows did not come within {_LAST_ROWS:.0f} s. {_first_gap(batch)}"
                )

    def _compute(self, batch: Batch, scheduler_output: Any) -> None:
        # Steps count on over all batches, so that what an abandoned batch left behind in
        # the ring can't pass for a row of this one.
        batch.start(self._step + 1)
        if self._reader is not None:
            self._reader.serve(batch)
        pending = set(batch.request_ids)
        while not batch.cancelled:
            if not scheduler_output.total_num_scheduled_tokens:
                raise CaptureError(_starved(batch, pending, self.vllm_config))
            self._step += 1
            last = self._is_last(scheduler_output, pending)
            arguments = (scheduler_output, self._step, self._features.two_phase_step, last)
            messages = self._step_rpc(arguments)
            self._untold -= scheduler_output.finished_req_ids
            for message in messages or ():
                batch.receive(message, message.payload)
            done = self._prefilled(scheduler_output, pending)
            self._finish(done)
            pending.difference_update(done)
            if not pending:
                return
            batch.wait(0)
            scheduler_output = self.schedule()

    def _is_last(self, scheduler_output: Any, pending: set[str]) -> bool:
        """Whether this scheduler step ends the prefill of all that are pending."""
        return pending.issubset(self._prefilled(scheduler_output, pending))

    def _step_rpc(self, arguments: tuple[Any, ...]) -> Any:
        """The RPC of a scheduler step.

        vLLM waits for a reply by spinning, which takes Python's lock from the thread that
        reads rows (1 GB/s in place of 10 on an H200). So the reply is only asked for when
        the worker has said, through the ring, that it is there.
        """
        rpc, patience = self.executor.collective_rpc, self._patience()
        names = inspect.signature(rpc).parameters
        bare_reply = self._features.bare_reply and "unique_reply_rank" in names
        if self._reader is None or not bare_reply:
            return self._rpc("vllm_compat_step", arguments, _CAPTURING_RANK, {}, patience)
        try:
            future = rpc(
                "vllm_compat_step",
                timeout=patience,
                args=arguments,
                unique_reply_rank=_CAPTURING_RANK,
                non_block=True,
            )
            deadline = time.monotonic() + (patience or float("inf"))
            while not self._reader.replied(arguments[1], _PULSE):
                if self._gone() or time.monotonic() > deadline:
                    break  # the reply says why
            return future.result()
        except Exception as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def schedule(self) -> Any:
        """The scheduler's next step; to be called in the engine's thread only.

        vLLM says once which requests have finished. The generator drops some of its steps
        (the last of a batch, which is empty, and that of an interrupted call), and with
        them this news: the workers would keep those requests for ever.
        """
        output = self.scheduler.schedule()
        self._untold |= output.finished_req_ids
        output.finished_req_ids = set(self._untold)
        return output

    def _patience(self) -> float | None:
        """How long a worker may take for a step, in seconds.

        If one of several fails, the others wait for it in the middle of a layer, and so
        does the one whose reply is wanted. A single worker can't be waiting for another.
        """
        if self.vllm_config.parallel_config.world_size == 1:
            return None
        from vllm import envs

        timeout = getattr(envs, "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", None)
        return None if timeout is None else float(timeout)

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
        """Takes a failed batch's requests out of the scheduler, after the running step.

        Doesn't wait: the next call queues behind it.
        """
        batch.cancelled = True
        if self._dead is None:
            self._caller.submit(self._remove, batch)
        elif self._reader is not None:
            self._reader.serve(None)

    def _remove(self, batch: Batch) -> None:
        if self._reader is not None:
            self._reader.serve(None)
        try:
            self._finish([r for r in batch.request_ids if r in self.scheduler.requests])
            self._rpc("vllm_compat_clean", (), None, {}, self._patience())
        except EngineDeadError:
            pass  # the next call says so
        except Exception as error:
            self._dead = f"it could not be cleaned up after an error: {error!r}"

    # -- life and death ------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises EngineDeadError if a worker is gone, or this process is another one."""
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"This generator belongs to process {self._pid}, of which this one is a fork. "
                "Make one of its own here."
            )
        if self._dead is None:
            self._dead = self._gone()
        if self._dead is not None:
            raise EngineDeadError(
                f"This generator is dead: {self._dead}. Make a new one to go on."
            )

    def _gone(self) -> str | None:
        silent = self._reader is not None and not self._reader.is_alive()
        for process in self._processes:
            if silent:
                process.join(timeout=1.0)  # its pipe breaks before it ends
            if _has_ended(process):
                how = _how(process.exitcode)
                return f"worker {process.name} (pid {process.pid}) ended{how}"
        if getattr(self.executor, "is_failed", False):
            return "vLLM's executor reports that it failed"
        if silent:
            return "the worker that sends the rows has closed its end"
        return None

    def _explained(self, error: Exception) -> Exception:
        """What an error of the executor means."""
        if isinstance(error, VllmCompatError):
            return error
        for process in self._processes:
            process.join(timeout=0.2)  # it may be ending
        if isinstance(error, TimeoutError) and self._gone() is None:
            self._dead = (
                "a worker gave no answer within VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS; what the "
                "workers printed above may say why"
            )
        if self._dead is None and (death := actor_death(error)) is not None:
            self._dead = death
        try:
            self.check_alive()
        except EngineDeadError as dead:
            return dead
        return CaptureError(f"vLLM failed: {error or type(error).__name__}")

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._dead = self._dead or "it was shut down"
        if os.getpid() != self._pid:
            return  # they are another process's
        try:
            with contextlib.suppress(Exception):
                _note_ends(self._processes)
                self.executor.shutdown()
            self._on_ray.release(self.executor)
        finally:
            # In the engine's thread, which may be in one of the queues that it closes.
            with contextlib.suppress(RuntimeError):  # no new thread while Python ends
                self._caller.submit(_release, self.executor)
            self._caller.stop()
            self.arena.close()
            self.copier.close()
            if self._reader is not None:
                self._reader.stop()


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _in_a_fork() -> None:
    """Lets go of another process's workers.

    vLLM tells a worker to end by closing a pipe, which takes effect once no process has that
    end any more. At the end of this process vLLM's finalizer would shut the executor down,
    and multiprocessing would send a signal to what it takes for children of this process.
    """
    for engine in _ENGINES:
        for process in engine._processes:
            with contextlib.suppress(Exception):
                _take_for_ended(process)
        for worker in getattr(engine.executor, "workers", None) or ():
            with contextlib.suppress(Exception):
                worker.death_writer.close()
        with contextlib.suppress(Exception):
            engine.executor._finalizer.detach()


os.register_at_fork(after_in_child=_in_a_fork)


def _release(executor: Any) -> None:
    """Lets go of an executor of vLLM's that has been shut down.

    Its finalizer holds the executor itself, which so is never freed: 10 descriptors and some
    threads for each generator (0.16.0). Its sockets have to be closed before: a garbage
    collection that meets one of their contexts first waits for the socket, for ever.
    """
    finalizer = getattr(executor, "_finalizer", None)
    queues = [q for q in getattr(executor, "response_mqs", None) or () if q is not None]
    if finalizer is None or getattr(executor, "rpc_broadcast_mq", None) is not None:
        return  # not one that is known, or not shut down
    from zmq.sugar.socket import Socket

    for queue_ in queues:
        for value in vars(queue_).values():
            if isinstance(value, Socket):
                value.close(linger=0)
    finalizer.detach()


def _has_ended(process: Any) -> bool:
    """Whether a worker is gone, also where nobody can ask how it ended.

    multiprocessing asks waitpid, which knows nothing of a child if SIGCHLD is ignored, or if a
    handler of the user's has collected it: the process would pass for alive for good.
    """
    if not process.is_alive():
        return True
    if not connection.wait([process.sentinel], 0):
        return False
    process.join(timeout=1.0)  # its pipe breaks before it ends
    if process.is_alive():
        _take_for_ended(process)
    return True


def _take_for_ended(process: Any) -> None:
    """Makes multiprocessing, and vLLM through it, leave a process alone.

    It is a private attribute (Popen.poll writes it, Python 3.10 to 3.13), but nothing public
    does it. A record of our own would not reach vLLM's shutdown, which waits for seconds
    while a process is_alive() and then sends it signals, nor multiprocessing's exit handler,
    which sends one too. By then another process may have that number.
    """
    process._popen.returncode = _UNKNOWN


def _note_ends(processes: list[Any]) -> None:
    """Marks workers as ended as they end, where multiprocessing can't see it by itself."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL:
        return

    def note() -> None:
        for process in processes:
            connection.wait([process.sentinel], _DEPARTURE)
            _has_ended(process)

    threading.Thread(target=note, name="vllm-compat-ends", daemon=True).start()


def _how(exit_code: int | None) -> str:
    if exit_code is None or exit_code == _UNKNOWN:
        return "; how is not known, since this process ignores or collects its children's ends"
    return f" with {shm.ended(-exit_code)}" if exit_code < 0 else f" with exit {exit_code}"


class _Caller:
    """A thread that runs one function after the other.

    Not a ThreadPoolExecutor: Python waits for those at exit, and a call into a worker that
    hangs would keep it from ending.
    """

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[tuple[futures.Future[Any], Any, Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[..., T], *args: Any) -> futures.Future[T]:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._todo,), name="vllm-compat-engine", daemon=True
            )
            self._thread.start()
        future: futures.Future[T] = futures.Future()
        self._todo.put((future, function, args))
        return future

    def stop(self) -> None:
        """Ends the thread after what it has been given."""
        self._todo.put(None)


def _work(todo: queue.SimpleQueue[Any]) -> None:
    while (item := todo.get()) is not None:
        future, function, args = item
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del item, future, function, args  # or the last batch would live until the next


class _Reader:
    """A thread that takes rows out of the ring and hands them to the batch at hand."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._batch: Batch | None = None
        self._replied = 0
        self._reply = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(
            target=self._run, name="vllm-compat-reader", daemon=True
        )
        self._thread.start()

    def serve(self, batch: Batch | None) -> None:
        """From now on messages are for this batch; without one they are dropped."""
        self._batch = batch

    def replied(self, step: int, timeout: float) -> bool:
        """Waits until the worker has replied to the RPC of that scheduler step."""
        with self._reply:
            return self._reply.wait_for(lambda: self._replied >= step, timeout)

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ends the thread and gives the ring back."""
        self._stopped = True
        if sys.is_finalizing():
            return  # no other thread runs any more, and the kernel takes all of it
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._ring.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                for message in self._ring.channel.read(timeout=1.0):
                    self._take(message)
        except Closed:
            self._fail(EngineDeadError("The worker that sends the rows has gone."))
        except BaseException as error:
            self._fail(CaptureError(f"The rows can't be read any more: {error!r}"))

    def _take(self, message: Message) -> None:
        if message.kind == Kind.REPLIED:
            with self._reply:
                self._replied = message.step
                self._reply.notify_all()
            return
        batch = self._batch
        try:
            if batch is not None and not batch.failed:
                batch.receive(message, self._ring.block(message) if message.nbytes else None)
        except VllmCompatError as error:
            self._fail(error)
        except Exception as error:
            self._fail(CaptureError(f"The worker sent what can't be right: {error}"))
        finally:
            if message.nbytes:
                self._ring.credit()

    def _fail(self, error: BaseException) -> None:
        batch = self._batch
        if batch is not None:
            batch.fail(error)


def _warn_of_small_shm() -> None:
    import vllm

    folder = Path(vllm.__path__[0])
    most = shm.queues(folder, os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB")).both
    now = shm.room()
    if now is not None and now.free < most:
        log.warning(
            "vllm-compat: vLLM's replies, which carry the rows, take up to %d MB of /dev/shm "
            "(%s). When it is full, a worker ends with signal 7 (SIGBUS). %s",
            most >> 20, now, shm.ADVICE,
        )  # fmt: skip


def _check_same(worker: dict[str, Any]) -> None:
    """A worker on another machine (Ray) may have other packages than this process."""
    import vllm

    from . import __version__

    for name, here in (("vllm", vllm.__version__), ("vllm-compat", __version__)):
        if worker[name] != here:
            raise UnsupportedEnvironmentError(
                f"Worker {worker['rank']} has {name} {worker[name]}, and this process has "
                f"{name} {here}: install the same on all machines."
            )


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
