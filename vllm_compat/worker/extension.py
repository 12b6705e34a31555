"""The class that vLLM mixes into each worker (``ParallelConfig.worker_extension_cls``).

Its methods are called by name through vLLM's ``collective_rpc``. vLLM refuses an extension
that has a name in common with the worker, so every one begins with ``vllm_compat_``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..transport.messages import Closed, Message, Segment
from ..transport.shared import Offer, Unavailable, Writer
from .blocks import Blocks
from .capture import Capture
from .convention import establish_convention
from .decoder import find_decoder
from .driver import end_with_driver
from .outbox import ReplyOutbox, RingOutbox
from .rope import check_rope
from .trial import TOKENS, Trial, remember

__all__ = ["CaptureExtension"]

# Under vLLM's logger: in a spawned worker nobody else has set up any.
log = logging.getLogger("vllm.vllm_compat")


class CaptureExtension:
    """Captures hidden states in a vLLM worker. Mixed in by vLLM; never constructed."""

    # Given by vLLM's worker (vllm/v1/worker/gpu_worker.py, all versions from 0.11).
    model_runner: Any
    vllm_config: Any
    rank: int

    _vllm_compat: _State

    def vllm_compat_setup(self, layer_ids: list[int]) -> dict[str, Any]:
        """Hooks the model. Called once, after the model was loaded.

        Args:
            layer_ids: decoder layers, ascending, each once.

        Returns:
            What was found, for the log and for ``status()``; or ``refused`` and why, if the
            model's states can't be captured with certainty.
        """
        try:
            return self._vllm_compat_setup(layer_ids)
        except UnsupportedModelError as error:
            return {"refused": str(error)}
        except Exception as error:
            # vLLM sends the text alone, which for some (AssertionError) is empty.
            raise RuntimeError(
                f"the set-up of the capture failed: {type(error).__name__}: {error}"
            ) from error

    def _vllm_compat_setup(self, layer_ids: list[int]) -> dict[str, Any]:
        runner = self.model_runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        text_config = self.vllm_config.model_config.hf_text_config
        parallel = self.vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            # Each stage holds some of the layers; the generator has no such argument.
            raise UnsupportedModelError("vllm-compat does not capture across pipeline stages.")
        # Also those that are no submodules of the model (vLLM's Transformers backend).
        known = self.vllm_config.compilation_config.static_forward_context.values()
        caching = [layer for layer in known if hasattr(layer, "kv_cache")]
        with torch.inference_mode():
            trial = Trial(model, self.vllm_config, runner.device)
            decoder = find_decoder(model, text_config, trial)
            convention, dtype = establish_convention(decoder, trial, TOKENS, caching, remember)
        rope = check_rope(
            decoder.layers, text_config, self.vllm_config.model_config.max_model_len
        )
        batch = _batch_order(runner)
        state = _State(type(model).__name__, decoder.path, str(dtype), batch)
        state.rope = rope
        state.capture = Capture(
            decoder,
            convention,
            layer_ids,
            state.segments,
            sends=_tensor_rank(self) == 0,
            model=model,
        )
        self._vllm_compat = state
        if parallel.distributed_executor_backend == "mp":
            end_with_driver()
            _leave_interrupts_to_the_driver()
        log.info(
            "vllm-compat: worker %d captures layers %s of %s (%s, %s).",
            self.rank, layer_ids, state.model, decoder.path, convention,
        )  # fmt: skip
        return self.vllm_compat_describe()

    def vllm_compat_know_blocks(self) -> dict[str, Any]:
        """Finds the blocks of the KV cache. Called once, after it was allocated.

        Returns:
            ``recurrent``: whether the model carries states from token to token; or
            ``refused`` and why.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        try:
            blocks = Blocks(self.model_runner.kv_cache_config, layers)
        except UnsupportedModelError as error:
            return {"refused": str(error)}
        self._vllm_compat.blocks = blocks
        return {"recurrent": blocks.recurrent}

    def vllm_compat_open(self, offer: Offer | None) -> str | None:
        """Opens the driver's memory, or none (then rows go with the replies).

        Returns:
            None, or why the memory can't be reached from here.
        """
        state = self._vllm_compat
        assert state.capture is not None
        if _tensor_rank(self) != 0:
            return None
        if offer is None:
            state.capture.outbox = ReplyOutbox()
            return None
        try:
            writer = Writer(offer)
        except Unavailable as reason:
            return str(reason)
        state.capture.outbox = RingOutbox(writer, self.model_runner.device)
        return None

    def vllm_compat_step(
        self, scheduler_output: Any, step: int, two_phase: bool, last: bool
    ) -> list[Message] | None:
        """One scheduler step: vLLM's own ``execute_model``, with capture.

        Args:
            scheduler_output: of vLLM's scheduler.
            step: its number, which the messages about its rows carry.
            two_phase: end the step here, in place of ``sample_tokens``: vLLM 0.11.1 and
                later return None from ``execute_model`` and keep the batch until then. No
                token is wanted, so the sampler doesn't run.
            last: no step of this batch follows.

        Returns:
            From the rank that sends: the messages that no ring carried.
        """
        state = self._vllm_compat
        capture = state.capture
        assert capture is not None
        assert state.blocks is not None
        state.scheduler_output = scheduler_output
        try:
            state.wait_for_inputs()
            state.blocks.begin(scheduler_output, last)
            capture.begin(step)
            try:
                self.execute_model(scheduler_output)  # type: ignore[attr-defined]
            finally:
                capture.end()
                if two_phase:
                    _settle(self.model_runner)
            if capture.outbox is None:
                return None
            if not capture.entered:
                raise RuntimeError("the model's forward was not run in this step")
            return capture.outbox.end(step, last)
        except Exception as error:
            # vLLM sends the text alone, which for some (MemoryError) is empty.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            if capture.outbox is not None:
                with contextlib.suppress(Closed):
                    capture.outbox.replied(step)

    def vllm_compat_clean(self) -> None:
        """Cleans the KV blocks of a batch that failed: it may have left NaN in them."""
        assert self._vllm_compat.blocks is not None
        self._vllm_compat.blocks.clean()

    def vllm_compat_close(self) -> None:
        """Takes the hooks off and gives the memory back."""
        state = getattr(self, "_vllm_compat", None)
        if state is not None and state.capture is not None:
            state.capture.remove()
            if state.capture.outbox is not None:
                state.capture.outbox.close()
                state.capture.outbox = None

    def vllm_compat_memory(self) -> tuple[int, int]:
        """Free and total memory of this worker's device, in bytes."""
        if self.model_runner.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.model_runner.device)
            return int(free), int(total)
        pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
        size = os.sysconf("SC_PAGE_SIZE")
        return pages[1] * size, pages[0] * size

    def vllm_compat_describe(self) -> dict[str, Any]:
        """What this worker runs; plain values."""
        import vllm

        from .. import __version__

        state = getattr(self, "_vllm_compat", None)
        if state is None or state.capture is None:
            return {"rank": self.rank, "pid": os.getpid(), "capture": "not set up"}
        outbox = state.capture.outbox
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "vllm": vllm.__version__,
            "vllm-compat": __version__,
            "device": str(self.model_runner.device),
            "runner": type(self.model_runner).__module__,
            "model": state.model,
            "layers": state.path,
            "convention": state.capture.convention,
            "dtype": state.dtype,
            "hidden_size": state.capture.decoder.hidden_size,
            "recurrent states": state.blocks is not None and state.blocks.recurrent,
            "rope": state.rope,
            "captures": list(state.capture.layer_ids) if _tensor_rank(self) == 0 else [],
            "transport": type(outbox).__name__ if outbox is not None else "none",
            "memory": outbox.memory if outbox is not None else "none",
        }


class _State:
    """What the extension keeps on a worker, in one attribute."""

    def __init__(self, model: str, path: str, dtype: str, batch: Any) -> None:
        self.model = model
        self.path = path
        self.dtype = dtype
        self.capture: Capture | None = None
        self.blocks: Blocks | None = None
        self.rope: dict[str, Any] | None = None
        self.scheduler_output: Any = None
        self._batch = batch
        self._inputs_read: Any = None

    def segments(self) -> list[Segment]:
        """Which rows the forward at hand computes, from the runner's own batch."""
        output = self.scheduler_output
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = output.num_scheduled_tokens
        order = self._batch()
        if sorted(order) != sorted(counts):
            raise RuntimeError(
                f"vllm-compat: the runner's batch {order} is not what was scheduled "
                f"{list(counts)}."
            )
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._inputs_read = torch.cuda.Event()
            self._inputs_read.record()
        return [Segment(r, int(starts[r]), int(counts[r])) for r in order]

    def wait_for_inputs(self) -> None:
        """Waits until the last step's inputs have been copied to the device.

        Without sampling nothing makes the host wait for the device, and the runner would
        fill its pinned input buffers for the next step while they are still to be copied.
        vLLM guards the same thing with an event when it schedules asynchronously
        (gpu_model_runner.synchronize_input_prep, 0.16.0).
        """
        event, self._inputs_read = self._inputs_read, None
        if event is None:
            return
        if self.capture is not None and self.capture.outbox is not None:
            self.capture.outbox.wait_for(event)
        else:
            event.synchronize()


def _batch_order(runner: Any) -> Any:
    """A function that gives the request ids in the order of the batch's rows.

    V1 runner: ``input_batch.req_ids``. V2 runner (vllm/v1/worker/gpu/model_runner.py): it
    has no such attribute; ``prepare_inputs`` returns the batch, which is noted on this one
    runner object as it passes.
    """
    if hasattr(runner, "input_batch"):
        return lambda: list(runner.input_batch.req_ids)
    if not hasattr(runner, "prepare_inputs"):
        raise UnsupportedModelError(
            f"vllm-compat does not know the batch of {type(runner).__module__}."
        )
    seen: dict[str, Any] = {}
    prepare = runner.prepare_inputs

    def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
        batch = prepare(*args, **kwargs)
        seen["batch"] = batch
        return batch

    runner.prepare_inputs = prepare_inputs
    return lambda: list(seen["batch"].req_ids)


def _settle(runner: Any) -> None:
    """Ends the step without a token.

    V1 runner: drops what ``execute_model`` keeps for ``sample_tokens`` (and checks at the
    next step). V2 runner: counts computed tokens in ``sample_tokens``, on the device; left
    out, the next chunk of a prompt would start at position 0 again.
    """
    if not hasattr(runner, "input_batch"):
        runner.sample_tokens(None)
    else:
        runner.execute_model_state = None
        if hasattr(runner, "kv_connector_output"):
            runner.kv_connector_output = None


def _leave_interrupts_to_the_driver() -> None:
    """A Ctrl-C on a terminal reaches every process of the group; vLLM's workers end by it.

    The user's process decides: it drops the batch, or ends, and its workers with it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _tensor_rank(worker: Any) -> int:
    return int(worker.rank % worker.vllm_config.parallel_config.tensor_parallel_size)
