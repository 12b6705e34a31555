"""One generator that lasts: it is made anew when it dies, and a bad sample fails alone."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CaptureError, EngineDeadError, InvalidInputError, VllmCompatError
from ..prompts import check_prompts
from ..worker_environment import cores_of_workers, variables
from .cores import Cores
from .errors import ReplicaError
from .files import packed, path_of, sync_folder, write_whole
from .job import Job
from .leftovers import Janitor
from .manifest import Outcome

__all__ = ["Failure", "Replica", "Writer"]

log = logging.getLogger("vllm_compat")

_DEATHS = 4  # in a row, without a batch between them
_VLLM_FAILED = "vLLM failed"  # how vllm_compat.engine begins such an error
_WRITERS = 4  # files at a time; as many as speculators' script


@dataclass(frozen=True)
class Failure:
    """A sample without states, and why."""

    reason: str


class Replica:
    """A generator in this process.

    What it computes for a batch depends on the batch alone: not on what came before, nor on
    which replica it is. A batch that fails is computed once more, sample by sample.

    Args:
        job: what to make.
        alone: nothing else goes on in this process.
    """

    def __init__(self, job: Job, alone: bool = False) -> None:
        self.job, self._alone = job, alone
        self._generator: Any = None
        self._applied = contextlib.ExitStack()  # the patches, for as long as the generator
        self._cores: Cores | None = None
        self._janitor: Janitor | None = None
        self._deaths = 0
        self._vocabulary = self._max_tokens = 0
        self.notes: list[str] = []
        self.device = ""

    def start(self) -> None:
        """Makes the generator.

        Raises:
            VllmCompatError: it can't be made; ReplicaError for whatever isn't said otherwise.
        """
        if self._generator is not None:
            return
        import vllm_compat

        self.job.check_here()
        self._applied.enter_context(
            vllm_compat.applied(transport=self.job.transport, executor=self.job.executor)
        )
        self._janitor = Janitor(self._alone)
        try:
            from speculators.data_generation.vllm_hidden_states_generator import (
                VllmHiddenStatesGenerator,
            )

            with self._binding():
                self._generator = VllmHiddenStatesGenerator(
                    model_path=self.job.model,
                    layer_ids=None if self.job.layer_ids is None else list(self.job.layer_ids),
                    max_model_len=self.job.seq_length,
                    gpu_memory_utilization=self.job.gpu_memory_utilization,
                    tensor_parallel_size=self.job.tensor_parallel_size,
                )
        except VllmCompatError:
            self._drop()
            raise
        except Exception as error:
            self._drop()
            raise ReplicaError(
                f"The generator can't be made: {type(error).__name__}: {error}"
            ) from error
        self._janitor.watch(self._generator.executor.worker_pids)
        config = self._generator.vllm_config
        self._vocabulary = config.model_config.get_vocab_size()
        self._max_tokens = config.model_config.max_model_len - 1
        self.device = _device_name()

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        cache = self._generator.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)

    @property
    def layer_ids(self) -> list[int]:
        """The layers, in the order of the states."""
        return list(self._generator.layer_ids)

    def states(self, prompts: Sequence[Any]) -> list[dict[str, Any] | Failure]:
        """The generator's results for a batch, or why there is none.

        Args:
            prompts: token ids of each sample.

        Returns:
            For each prompt the dict of ``generate`` (``input_ids`` [n], ``hidden_states``, a
            list of [n, hidden] on the CPU, ``loss_mask`` None), or a Failure.

        Raises:
            ReplicaError: the engine keeps dying.
        """
        self.start()
        results: list[Any] = [None] * len(prompts)
        good: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            try:
                (good[place],) = check_prompts([prompt], self._vocabulary, self._max_tokens)
            except InvalidInputError as error:
                results[place] = Failure(_about_one(error))
        if good:
            for place, result in zip(good, self._all(list(good.values())), strict=True):
                results[place] = result
        return results

    def close(self) -> None:
        """Ends the workers and gives the cores back."""
        self._drop()
        if self._cores is not None:
            self._cores.release()
            self._cores = None

    # -- inside ----------------------------------------------------------------------------

    def _all(self, prompts: list[list[int]]) -> list[Any]:
        reason = ""
        for _ in range(2):
            self.start()
            try:
                results: list[Any] = self._generator.generate(prompts)
                self._deaths = 0
                return results
            except EngineDeadError as error:
                reason = f"the engine died of it: {error}"
                self._died(error)
            except (CaptureError, InvalidInputError) as error:
                reason = _about_one(error)
                if not reason.startswith(_VLLM_FAILED):
                    break
                # An error out of vLLM itself may have left the device in any state.
                self._died(error)
        if len(prompts) == 1:
            return [Failure(reason)]
        log.warning("A batch failed (%s); its samples are computed one by one.", reason)
        return [self._all([prompt])[0] for prompt in prompts]

    def _died(self, error: Exception) -> None:
        self._drop()
        self._deaths += 1
        if self._deaths > _DEATHS:
            raise ReplicaError(f"The engine keeps failing: {error}") from error
        log.warning("The engine failed and is started anew: %s", error)

    def _drop(self) -> None:
        generator, self._generator = self._generator, None
        if generator is not None:
            with contextlib.suppress(Exception):
                generator.executor.shutdown()
            del generator
            gc.collect()
        self._applied.close()
        if self._janitor is not None:
            self._janitor.clean()
            self._janitor = None

    @contextlib.contextmanager
    def _binding(self) -> Iterator[None]:
        """Keeps to some of the CPU's cores, if that is wanted."""
        if self.job.cpus is None or self.job.executor != "mp":
            yield
            return
        if self._cores is None:
            self._cores = Cores(self.job.cpus)
            if not self._cores.ids:
                self.notes.append(
                    f"there are no {self.job.cpus} cores free for a replica; it shares them"
                )
        cores, workers = self._cores.ids, self.job.tensor_parallel_size
        with variables(cores_of_workers(cores, workers, self.job.cpus)):
            yield


class Writer:
    """Writes samples with threads of its own, while the engine computes the next ones.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="vllm-compat-writer")

    def submit(
        self, indices: Sequence[int], results: Sequence[Any], masks: Sequence[Any]
    ) -> list[Future[Outcome]]:
        """Begins to write the samples of a batch.

        Args:
            indices: of the samples.
            results: of :meth:`Replica.states`.
            masks: loss masks; at least as long as the samples.

        Returns:
            Futures of what became of each; they raise DiskError.
        """
        return [
            self._pool.submit(self._write, *each)
            for each in zip(indices, results, masks, strict=True)
        ]

    def _write(self, index: int, result: Any, mask: Any) -> Outcome:
        if isinstance(result, Failure):
            return Outcome(index, "failed", reason=result.reason)
        import numpy
        import torch

        tokens = len(result["input_ids"])
        # A copy, because torch.save writes the whole storage that a slice belongs to.
        loss_mask = torch.from_numpy(numpy.array(mask[:tokens], dtype=numpy.int64))
        data = packed(
            {
                "input_ids": result["input_ids"],
                "hidden_states": [h.contiguous() for h in result["hidden_states"]],
                "loss_mask": loss_mask,
            }
        )
        write_whole(path_of(self._folder, index), data)
        return Outcome(index, "written", tokens, len(data))

    def durable(self) -> None:
        """The names of all files that are done will survive a loss of power."""
        sync_folder(self._folder)

    def close(self) -> None:
        """Waits for what has begun."""
        self._pool.shutdown(wait=True)


def _about_one(error: Exception) -> str:
    return str(error).replace("Sequence 0", "The sample", 1)


def _device_name() -> str:
    from vllm.platforms import current_platform

    with contextlib.suppress(Exception):
        if not current_platform.is_cpu():
            return str(current_platform.get_device_name())
    return f"cpu ({os.uname().machine})"
