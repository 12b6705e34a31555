"""Replicas on Ray Data: a Ray of its own, or a cluster's."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ..system import usable_cores
from .actors import StateFiles
from .errors import ReplicaError
from .job import Job, on_cpu

__all__ = ["Cluster", "connection"]

# Of the user's environment, what replicas on other machines must have as well.
_PASSED_ON = ("VLLM_", "HF_HUB_OFFLINE", "HF_HOME", "HF_TOKEN", "TRANSFORMERS_OFFLINE")
# Of one machine, or one replica, alone; vLLM keeps the same from its own Ray workers.
_OWN = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_HOST_IP", "VLLM_HOST_PORT", "VLLM_PORT")
_DEPARTURE = 15.0  # seconds


class Cluster:
    """Where the replicas run.

    Args:
        job: what each of them is.
        replicas: how many.
        address: of a Ray cluster; None: a Ray of its own, started and stopped, unless this
            process is connected to one already.
        store: bytes of its own Ray's object store.
    """

    def __init__(self, job: Job, replicas: int, address: str | None, store: int) -> None:
        self.job, self.replicas, self.address = job, replicas, address
        self._store = store
        self._stack = contextlib.ExitStack()
        self._gpus = 0.0
        self._used: dict[str, float] = {}
        self.notes: list[str] = []

    def __enter__(self) -> Cluster:
        import ray

        cores = len(usable_cores())
        ours = self._stack.enter_context(
            connection(
                self.address,
                num_cpus=max(cores, self.replicas * (self.job.cpus or 1)),
                object_store_memory=self._store,
            )
        )
        if ours:
            self._stack.push(self._await_departure)
        try:
            self._share_out(ray)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def compute(
        self,
        tables: Iterable[Any],
        output: Path,
        tries: int,
        row: Callable[[dict[str, Any]], None],
    ) -> str:
        """Runs batches through the replicas.

        Args:
            tables: one for each batch.
            output: folder for the files.
            tries: how often a batch is given to another actor when one dies under it.
            row: called with each row that :class:`StateFiles` gives.

        Returns:
            What Ray said, if it gave up.
        """
        import ray
        import ray.data

        context = ray.data.DataContext.get_current()
        kept = (context.enable_progress_bars, context.max_errored_blocks)
        # A batch whose actors keep dying must not take the others with it.
        context.enable_progress_bars, context.max_errored_blocks = False, -1
        try:
            dataset = ray.data.from_arrow(list(tables)).map_batches(
                StateFiles,
                fn_constructor_kwargs={"job": self.job, "output": str(output)},
                # A block is a batch: one of Ray's choice would depend on timing.
                batch_size=None,
                batch_format="numpy",
                compute=ray.data.ActorPoolStrategy(
                    size=self.replicas, max_tasks_in_flight_per_actor=3
                ),
                num_cpus=self.job.cpus or 1,
                num_gpus=self._gpus or None,
                max_concurrency=2,  # one computes while the files of the other are written
                max_task_retries=tries,
                runtime_env={"env_vars": self._environment()},
            )
            with _quiet():
                for batch in dataset.iter_batches(
                    batch_size=None, prefetch_batches=0, batch_format="numpy"
                ):
                    for values in zip(*batch.values(), strict=True):
                        row(dict(zip(batch, values, strict=True)))
        except ray.exceptions.RayError as error:
            return str(error).strip().splitlines()[0]
        finally:
            context.enable_progress_bars, context.max_errored_blocks = kept
        return ""

    # -- inside ----------------------------------------------------------------------------

    def _await_departure(self, kind: type[BaseException] | None, *_: object) -> None:
        """Lets actors end their workers: if killed, they leave files in /dev/shm behind."""
        import ray

        if kind is not None:
            return
        deadline = time.monotonic() + _DEPARTURE
        while time.monotonic() < deadline:
            total, free = ray.cluster_resources(), ray.available_resources()
            # Of what is there now: a node may have been lost.
            if all(
                free.get(k, 0.0) + used >= total.get(k, 0.0) for k, used in self._used.items()
            ):
                return
            time.sleep(0.1)

    def _share_out(self, ray: Any) -> None:
        """Decides which devices a replica takes."""
        total = ray.cluster_resources()
        free = ray.available_resources()
        self._used = {k: total.get(k, 0.0) - free.get(k, 0.0) for k in ("CPU", "GPU")}
        if self.job.executor == "ray":
            # vLLM's own workers take the devices; the actor only drives them.
            self._gpus = 0.0
            self.job = replace(self.job, cpus=1)
            return
        if not on_cpu():
            self._gpus = float(self.job.tensor_parallel_size)
            there = total.get("GPU", 0.0)
            self._fit("GPU", self._gpus, there)
            return
        if self.job.cpus is None:
            nodes = [
                int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]
            ]
            share = max(sum(nodes) // self.replicas, 1)
            while share > 1 and sum(n // share for n in nodes) < self.replicas:
                share -= 1
            self.job = replace(self.job, cpus=max(share, self.job.tensor_parallel_size))
        self._fit("CPU", float(self.job.cpus or 1), total.get("CPU", 0.0))

    def _fit(self, what: str, each: float, there: float) -> None:
        if there < each:
            raise ReplicaError(f"A replica needs {each:g} {what}; Ray has {there:g}.")
        if there < each * self.replicas:
            self.notes.append(
                f"{self.replicas} replicas need {each * self.replicas:g} {what} and Ray has "
                f"{there:g}: {int(there // each)} run, others when there is room"
            )

    def _environment(self) -> dict[str, str]:
        passed = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_PASSED_ON) and name not in _OWN
        }
        # What each replica would say of itself is no news to anybody.
        passed.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        passed.setdefault("VLLM_NO_USAGE_STATS", "1")
        passed.setdefault("TRANSFORMERS_VERBOSITY", "error")
        passed.setdefault("TQDM_DISABLE", "1")
        if "VLLM_CPU_KVCACHE_SPACE" not in passed and not self._gpus:
            # vLLM would take half of the machine's memory, and each replica would.
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
            passed["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, min(4, memory // 4 // self.replicas)))
        return passed


@contextlib.contextmanager
def connection(address: str | None, **local: Any) -> Iterator[bool]:
    """A connection to Ray, for as long as it is needed.

    Args:
        address: of a cluster; None: a Ray of its own. A connection that is there is used.
        local: arguments for a Ray of its own.

    Yields:
        Whether it was made here, and so ends here.

    Raises:
        ReplicaError: there is no Ray at the address, or none can be started.
    """
    import ray

    if ray.is_initialized():
        yield False
        return
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
    try:
        if address is not None:
            ray.init(address=address, **common)
        else:
            ray.init(address="local", include_dashboard=False, **common, **local)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"the Ray cluster at {address}" if address else "a local Ray"
        raise ReplicaError(f"Can't reach {where}: {error}") from error
    try:
        yield True
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _quiet() -> Any:
    """Without Ray Data's own account of each execution; ours says what counts."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
