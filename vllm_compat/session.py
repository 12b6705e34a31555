"""One generator: what is known while it is built, and the door in front of ``generate``.

The generator's own ``__init__`` and ``generate`` run as they are. The names that they use
(``Request``, ``Scheduler``, ``MultiprocExecutor``, ...) are adapters while patches are on;
the adapters find the generator that they serve in :func:`current_session`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import numbers
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from .canary import Canary
from .defaults import on_cpu, workers_start
from .errors import (
    CaptureError,
    EngineDeadError,
    InvalidInputError,
    UnsupportedEnvironmentError,
    VllmCompatError,
)
from .prompts import check_layer_ids, check_prompts
from .seams import SERVED
from .settings import Settings
from .state import features, generation, overridden

if TYPE_CHECKING:
    # Both import torch, which apply() must not.
    from .batch import Batch
    from .engine import Engine
    from .features import Features
    from .kv_planning import KVCachePlan

__all__ = ["Session", "current_session", "describe_workers", "guarded_generate", "guarded_init"]

log = logging.getLogger("vllm_compat")

T = TypeVar("T")

_ATTRIBUTE = "_vllm_compat_session"
_LIVE: weakref.WeakSet[Session] = weakref.WeakSet()
# Starting workers changes the environment of this process for a while: one at a time.
_BUILDING = threading.RLock()
_OVERTAKEN = (
    "vllm-compat's patches were reverted, by another thread, while this generator was at work."
)
_REVERTED = (
    "This generator was made with vllm-compat's patches on, and they have been reverted "
    "since. Make it anew, or keep them on."
)


class Session:
    """State of one generator.

    Attributes:
        vllm_config: set when the generator makes its config.
        engine: set when it makes its executor.
        layer_ids: the layers asked for, in the caller's order.
        batch: of the call of ``generate`` that is running.
        kv_cache: how the KV cache was planned.
        features: of the installed vLLM and speculators.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self.vllm_config: Any = None
        self.engine: Engine | None = None
        self.layer_ids: list[int] = []
        self.batch: Batch | None = None
        self.kv_cache: KVCachePlan | None = None
        self.block_hasher: Any = None
        self._canary: Canary | None = None
        self._canary_share = Settings.read().canary
        self.busy = threading.Lock()
        _LIVE.add(self)

    @property
    def running_engine(self) -> Engine:
        """The engine.

        Raises:
            VllmCompatError: the generator has not made its executor yet.
        """
        if self.engine is None:
            raise VllmCompatError("The generator uses its executor before it has made it.")
        return self.engine

    @property
    def running_batch(self) -> Batch:
        """The batch of the call of ``generate`` that is running.

        Raises:
            EngineDeadError: there is none: ``generate`` is no longer the one that was
                wrapped.
        """
        if self.batch is None:
            raise EngineDeadError(_REVERTED)
        return self.batch

    @property
    def canary(self) -> Canary:
        """What computes sequences a second time, now and then."""
        if self._canary is None:
            self._canary = Canary(self._canary_share, self.running_engine.recurrent)
        return self._canary

    def close(self) -> None:
        """Ends the workers."""
        if self.engine is not None:
            self.engine.close()


def current_session() -> Session:
    """The generator that the code at hand works for.

    Raises:
        VllmCompatError: an adapter was called from outside of a generator.
    """
    session: Session | None = SERVED.get()
    if session is None:
        raise VllmCompatError(
            "A name that vllm-compat adapts for speculators' generator was used outside of "
            "one. Use vLLM's own names instead of those in the generator's module."
        )
    return session


def describe_workers() -> Iterator[dict[str, Any]]:
    """What the workers of all live generators say of themselves."""
    for session in list(_LIVE):
        engine = session.engine
        if engine is None:
            continue
        if not session.busy.acquire(blocking=False):
            yield {"generator": "busy"}
            continue
        try:
            yield from engine.rpc("vllm_compat_describe")
        except VllmCompatError as error:
            yield {"generator": str(error)}
        finally:
            session.busy.release()


# -- the generator's constructor ----------------------------------------------------------


def guarded_init(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps ``VllmHiddenStatesGenerator.__init__``."""
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from .worker_environment import process_settings_kept

        _refuse_child()
        began = generation()
        for sentence in overridden():
            log.warning("vllm-compat: %s; if it doesn't call ours, this will fail.", sentence)
        bound = signature.bind(self, *args, **kwargs)
        if "layer_ids" in bound.arguments:
            bound.arguments["layer_ids"] = check_layer_ids(bound.arguments["layer_ids"])
        _check_lengths(bound.arguments)
        session = Session(features())
        token = SERVED.set(session)
        try:
            with _BUILDING, process_settings_kept(), on_cpu(), workers_start():
                original(*bound.args, **bound.kwargs)
        except BaseException as error:
            session.close()
            if generation() != began:
                raise VllmCompatError(_OVERTAKEN) from error
            explained = _explained(error)
            if explained is error:
                raise
            raise explained from None  # vLLM's own says less, at length
        finally:
            SERVED.reset(token)
        setattr(self, _ATTRIBUTE, session)

    return _as_was(__init__, original)


def _check_lengths(arguments: dict[str, Any]) -> None:
    length = arguments.get("max_model_len")
    if length is not None and (not isinstance(length, numbers.Integral) or length < 2):
        raise InvalidInputError(
            f"max_model_len={length!r}: at least 2 tokens are needed, one of the prompt and "
            "one that vLLM reserves for the output."
        )


def _refuse_child() -> None:
    """A spawned worker imports the user's script; without a guard it would start over."""
    from multiprocessing import current_process

    if getattr(current_process(), "_inheriting", False):
        sys.exit(
            "vllm-compat: this script makes a generator when it is imported, and vLLM's "
            "workers import it. Put what it does under  if __name__ == '__main__':"
        )


def _explained(error: BaseException) -> BaseException:
    """Puts the usual failures of construction into one sentence."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(error, AssertionError) and "daemonic processes" in str(error):
        return UnsupportedEnvironmentError(
            "This is a daemonic process (one of multiprocessing.Pool's, say), which may not "
            "start others, and vLLM's workers are processes. Start it with daemon=False, or "
            "use concurrent.futures.ProcessPoolExecutor."
        )
    if isinstance(error, Exception) and "WorkerProc initialization failed" in str(error):
        hint = ""
        if file is not None and _lacks_guard(file):
            hint = (
                f" {file} has no  if __name__ == '__main__':  around what it does; vLLM's "
                "workers import it, so it needs one."
            )
        return UnsupportedEnvironmentError(
            f"vLLM's workers did not start; what they printed above says why.{hint}"
        )
    return error


def _lacks_guard(file: str) -> bool:
    with contextlib.suppress(OSError, UnicodeDecodeError), open(file, encoding="utf-8") as text:
        return "__main__" not in text.read()
    return False


# -- generate -------------------------------------------------------------------------------


def guarded_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``VllmHiddenStatesGenerator.generate``."""

    def generate(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        session: Session | None = getattr(self, _ATTRIBUTE, None)
        if session is None:
            result: list[dict[str, Any]] = original(self, token_ids)
            return result
        engine = session.running_engine
        engine.check_alive()
        model_config = session.vllm_config.model_config
        prompts = check_prompts(
            token_ids, model_config.get_vocab_size(), model_config.max_model_len - 1
        )
        # One batch at a time: a second thread waits for the first one's.
        with session.busy:
            return _generate(original, self, session, engine, prompts)

    return _as_was(generate, original)


def _generate(
    original: Callable[..., Any],
    generator: Any,
    session: Session,
    engine: Engine,
    prompts: list[list[int]],
) -> list[dict[str, Any]]:
    def alone(prompt: list[int]) -> list[Any]:
        (result,) = _computed(original, generator, session, engine, [prompt])
        states: list[Any] = result["hidden_states"]
        return states

    began = generation()
    token = SERVED.set(session)
    try:
        begun = time.monotonic()
        results = _computed(original, generator, session, engine, prompts)
        seconds = time.monotonic() - begun
        states = [result["hidden_states"] for result in results]
        session.canary.look(prompts, states, seconds, alone)
        return results
    except BaseException as error:
        if generation() != began:
            raise VllmCompatError(_OVERTAKEN) from error
        raise
    finally:
        SERVED.reset(token)


def _computed(
    original: Callable[..., Any],
    generator: Any,
    session: Session,
    engine: Engine,
    prompts: list[list[int]],
) -> list[dict[str, Any]]:
    """One run of the generator's own ``generate``, with its account of rows."""
    import torch

    from .batch import Batch

    batch = Batch(
        prompts,
        session.layer_ids,
        int(engine.description["hidden_size"]),
        getattr(torch, engine.description["dtype"].rpartition(".")[2]),
        engine.arena,
        engine.copier,
    )
    try:
        session.batch = batch
        with on_cpu():
            results: list[dict[str, Any]] = original(generator, prompts)
        _check_results(results, batch)
        return results
    except BaseException:
        engine.abandon(batch)
        raise
    finally:
        session.batch = None


def _check_results(results: list[dict[str, Any]], batch: Batch) -> None:
    """What the caller gets is what was asked for, in the order in which it was asked."""
    if len(results) != len(batch.prompts):
        raise CaptureError(f"{len(results)} results for {len(batch.prompts)} sequences.")
    for index, (result, prompt) in enumerate(zip(results, batch.prompts, strict=True)):
        if result["input_ids"].tolist() != prompt:
            raise CaptureError(f"Sequence {index}: the result has another one's input_ids.")
        for layer, states in zip(batch.layer_ids, result["hidden_states"], strict=True):
            if states.shape[0] != len(prompt) or not states.is_contiguous():
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: {tuple(states.shape)} for "
                    f"{len(prompt)} tokens."
                )


def _as_was(replacement: Callable[..., T], original: Any) -> Callable[..., T]:
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(replacement, name, getattr(original, name, None))
    replacement.__wrapped__ = original  # type: ignore[attr-defined]
    return replacement
