"""Real generators on tiny models, small enough in every limit that each is reached at once."""

from __future__ import annotations

import contextlib
import gc
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.hybrid import HYBRID
from conformance.models import Family, Reference, write_checkpoint
from families.cpu_workarounds import VARIABLE, write_entry_point
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import vllm_compat
from vllm_compat.transport.messages import Message

# CPU workers would take a share of all memory for the KV cache, and from vLLM 0.20 on refuse
# to start if it isn't free.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

# The worker of the engine that tests share waits by spinning. A second engine, whose team of
# threads meets at each operation, would hardly get on beside it on two cores.
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}

# bf16 noise of these models is 0.3 to 1.5 % of a row's length; a row of another token is off
# by about 100 %.
ROW_TOLERANCE = 0.05

WINDOW = 32
BUDGET, SEQUENCES, MAX_LEN = 64, 8, 512
"""Tokens of a scheduler step, sequences at the same time, tokens of a prompt and one more."""

FAMILIES = {
    # Layer ids: not sorted, one twice, the last among them.
    "llama": Family("llama", LlamaConfig, LlamaForCausalLM, 4, (2, 0, 3, 2), None),
    # Every layer slides.
    "mistral": Family(
        "mistral",
        partial(MistralConfig, sliding_window=WINDOW),
        MistralForCausalLM,
        4,
        (3, 1),
        None,
    ),
    # Every second layer slides: two groups of KV cache.
    "gemma2": Family(
        "gemma2",
        partial(
            Gemma2Config,
            sliding_window=WINDOW,
            query_pre_attn_scalar=32,
            hidden_act="gelu_pytorch_tanh",  # vLLM reads this name, transformers another
            attn_implementation="eager",
        ),
        Gemma2ForCausalLM,
        4,
        (3, 0, 1),
        None,
    ),
    # Three of four layers carry a state from token to token.
    "qwen3_next": HYBRID,
}


class Subject:
    """A generator, and what is right for it."""

    def __init__(self, generator: Any, reference: Reference, layer_ids: Sequence[int]) -> None:
        self.generator = generator
        self.reference = reference
        self.layer_ids = tuple(layer_ids)

    def know(self, *prompts: Sequence[int]) -> None:
        """Asks transformers now: its model is not made for several threads."""
        for ids in prompts:
            self.reference(ids)

    def check(self, batch: Any, expected: Sequence[Sequence[int]] | None = None) -> list[Any]:
        """Generates, and compares every row with transformers.

        Args:
            batch: what ``generate`` is given.
            expected: the prompts that it stands for; by default itself.
        """
        expected = batch if expected is None else expected
        results = self.generator.generate(batch)
        assert len(results) == len(expected)
        storages = []
        for place, (result, ids) in enumerate(zip(results, expected, strict=True)):
            assert set(result) == {"input_ids", "hidden_states", "loss_mask"}
            assert result["loss_mask"] is None
            assert result["input_ids"].dtype == torch.long
            assert result["input_ids"].tolist() == list(ids), f"result {place} is another's"
            states = result["hidden_states"]
            assert len(states) == len(self.layer_ids)
            for layer, state, right in zip(
                self.layer_ids, states, self.reference(ids), strict=True
            ):
                where = f"result {place} ({len(ids)} tokens), layer {layer}"
                assert state.shape == right.shape, where
                assert state.dtype == torch.bfloat16, where
                assert state.device.type == "cpu", where
                assert state.is_contiguous(), where
                storages.append(state.untyped_storage().data_ptr())
                off = error_of(state, right)
                worst = int(off.argmax())
                assert off[worst] < ROW_TOLERANCE, f"{where}: row {worst}: {off[worst]:.1%}"
        assert len(set(storages)) == len(storages), "results share memory"
        return results

    @property
    def worker(self) -> Any:
        """The (only) worker's process."""
        (process,) = self.engine._processes
        return process

    @property
    def engine(self) -> Any:
        return self.generator.executor._session.engine

    def in_worker(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in the worker; it gets the worker as first argument."""
        (reply,) = self.generator.executor.collective_rpc(function, args=args)
        return reply

    @contextlib.contextmanager
    def hooked(self, hook: Callable[..., Any], layer: int = 1) -> Iterator[None]:
        """A forward hook on a decoder layer, in the worker."""

        def install(worker: Any) -> None:
            layers = worker.model_runner.model.model.layers
            worker.worker.test_hook = layers[layer].register_forward_hook(hook)

        def remove(worker: Any) -> None:
            worker.worker.test_hook.remove()

        self.in_worker(install)
        try:
            yield
        finally:
            self.in_worker(remove)

    def close(self) -> None:
        if hasattr(self, "generator"):  # some tests delete it
            self.generator.executor.shutdown()


def error_of(state: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Of each row, in parts of its length."""
    return (state.float() - right).norm(dim=-1) / right.norm(dim=-1)


class Checkpoints:
    """Writes each checkpoint once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Path, Any]] = {}

    def __call__(self, name: str) -> tuple[Path, Reference]:
        if name not in self._known:
            folder = self._folder / name
            model = write_checkpoint(FAMILIES[name], folder)
            self._known[name] = folder, Reference(model, FAMILIES[name].layer_ids)
        return self._known[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="package")
def applied() -> Iterator[Any]:
    with mock.patch.dict(os.environ, ONE_THREAD), vllm_compat.applied() as report:
        yield report


Build = Callable[..., Subject]


@pytest.fixture(scope="package")
def build(applied: Any, checkpoints: Checkpoints) -> Iterator[Build]:
    """Makes generators; ends those that are left."""
    made: list[Subject] = []

    def make(name: str = "llama", **arguments: Any) -> Subject:
        folder, reference = checkpoints(name)
        layer_ids = arguments.pop("layer_ids", FAMILIES[name].layer_ids)
        generator = generator_of(folder, layer_ids=list(layer_ids), **arguments)
        made.append(Subject(generator, reference, layer_ids))
        return made[-1]

    yield make
    for subject in made:
        subject.close()


@pytest.fixture(scope="package")
def shared(build: Build) -> Subject:
    """One engine for all that an engine survives: each test so also finds what another left."""
    return build()


@pytest.fixture(scope="package")
def hybrid(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """Qwen3-Next. vLLM 0.16.0 has no kernels for it on a CPU: they are plain torch here (see
    ``gated_delta_net``), for a prefill and for a decode step. Which of the two a prompt is, the
    cache of states and its blocks are vLLM's own."""
    folder = tmp_path_factory.mktemp("workarounds")
    write_entry_point(folder)
    with (
        mock.patch.dict(os.environ, {VARIABLE: "gated_delta_net"}),
        # Spawned workers get this, and find the entry point there.
        mock.patch.object(sys, "path", [*sys.path, str(folder)]),
    ):
        # 20 blocks in all: 4 for a prompt, and one more for each 272 tokens or so.
        return build("qwen3_next", max_model_len=640, blocks=5)


class Restarts:
    """Counts, of each request, how often it was computed from position 0 on."""

    def __init__(self) -> None:
        self.starts: dict[str, int] = {}
        self.together = 0

    def note(self, segments: list[Any]) -> None:
        self.together = max(self.together, len(segments))
        for segment in segments:
            if segment.start == 0:
                self.starts[segment.request_id] = self.starts.get(segment.request_id, 0) + 1

    @property
    def preempted(self) -> int:
        return sum(count > 1 for count in self.starts.values())


@pytest.fixture
def restarts() -> Iterator[Restarts]:
    seen, read = Restarts(), Message.segments

    def segments(message: Message) -> list[Any]:
        found = read(message)
        seen.note(found)
        return found

    with mock.patch.object(Message, "segments", segments):
        yield seen


def generator_of(
    folder: Path,
    *,
    max_model_len: int = MAX_LEN,
    budget: int = BUDGET,
    max_num_seqs: int = SEQUENCES,
    blocks: int | None = None,
    layer_ids: list[int] | None = None,
    **arguments: Any,
) -> Any:
    """speculators' generator, with small limits.

    Args:
        folder: the checkpoint.
        max_model_len: in tokens.
        budget: tokens of a scheduler step; less than a prompt, so that prompts are cut up.
        max_num_seqs: sequences that run at the same time.
        blocks: blocks of the KV cache; one of them is vLLM's own.
        layer_ids: of the states.
    """
    from speculators.data_generation import vllm_hidden_states_generator as module

    from vllm_compat.engine import Engine

    if (
        "max_num_batched_tokens"
        in inspect.signature(module.VllmHiddenStatesGenerator).parameters
    ):
        arguments.setdefault("max_num_batched_tokens", budget)
    rpc, page = Engine.rpc, [0]

    def small(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "determine_available_memory" and blocks is not None:
            return [blocks * page[0]]  # VLLM_CPU_KVCACHE_SPACE counts in GiB
        reply = rpc(self, method, *args, **kwargs)
        if method == "get_kv_cache_spec":
            page[0] = sum(spec.page_size_bytes for spec in reply[0].values())
        return reply

    with (
        mock.patch.object(Engine, "rpc", small),
        mock.patch.object(module, "MAX_NUM_SEQS", max_num_seqs),
        # 0.3.0 takes no budget: max(MIN_MAX_BATCHED_TOKENS, max_model_len) makes it.
        mock.patch.object(module, "max", create=True, return_value=budget),
    ):
        return module.VllmHiddenStatesGenerator(
            str(folder), layer_ids=layer_ids, max_model_len=max_model_len, **arguments
        )


# -- what is left behind ---------------------------------------------------------------------


def wait_until(true: Callable[[], Any], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def children() -> set[int]:
    """Workers of this process that are alive."""
    gc.collect()
    return {p.pid for p in multiprocessing.active_children() if p.pid is not None}


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
