"""``Scheduler``: the arguments that its constructor wants now."""

from __future__ import annotations

from typing import Any

from ..record import Patch, Symbol, at
from ..session import Session, current_session
from ..stand_in import StandIn

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
# In the call of Scheduler(); CacheConfig gets one in every speculators.
_PASSES_BLOCK_SIZE = (
    "structured_output_manager=structured_output_manager,\n            block_size="
)


class _Queued(StandIn):
    """vLLM's scheduler as the generator sees it: the engine's thread makes the calls.

    An interrupt (Ctrl-C) so finds a scheduler that is never half way through one.
    """

    def __init__(self, session: Session, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._session = session

    def add_request(self, request: Any) -> Any:
        _ = self._session.running_batch  # or nobody would ever take the request out again
        return self._session.running_engine.run(self._original.add_request, request)

    def schedule(self) -> Any:
        engine = self._session.running_engine
        return engine.run(engine.schedule)

    def finish_requests(self, *args: Any) -> Any:
        return self._session.running_engine.run(self._original.finish_requests, *args)


def _queued(original: Any) -> Any:
    def Scheduler(**kwargs: Any) -> Any:
        session = current_session()
        features, plan = session.features, session.kv_cache
        if features.scheduler_block_size and plan is not None:
            # 0.4.x passes 16 whatever the platform's block size is.
            kwargs["block_size"] = plan.block_size
            if plan.hash_block_size is not None:
                kwargs["hash_block_size"] = plan.hash_block_size
        elif features.scheduler_without_block_size:
            del kwargs["block_size"]
        session.running_engine.scheduler = original(**kwargs)
        return _Queued(session, session.running_engine.scheduler)

    return Scheduler


PATCHES = (
    Patch(
        name="scheduler",
        why="the batch is driven to its end here, with the generator's own scheduler",
        upstream="vllm/v1/core/sched/scheduler.py",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={at("Scheduler"): _queued},
        relies_on=(
            Symbol(
                _SCHEDULER,
                ("vllm_config", "kv_cache_config", "structured_output_manager"),
                "the scheduler can't be built",
            ),
            Symbol(f"{_SCHEDULER}.schedule"),
            Symbol(f"{_SCHEDULER}.add_request", ("request",)),
            Symbol(f"{_SCHEDULER}.finish_requests", ("request_ids", "finished_status")),
            Symbol(f"{_SCHEDULER}.requests", if_gone="finished prefills can't be told"),
            Symbol("vllm.v1.request:Request.num_computed_tokens"),
            Symbol("vllm.v1.request:Request.num_prompt_tokens"),
        ),
    ),
    Patch(
        name="scheduler-block-size",
        why="Scheduler() needs block_size, and it must be the block size of the KV cache",
        upstream="vllm/v1/core/sched/scheduler.py (0.11.1; hash_block_size 0.20.2)",
        delete_when="vLLM 0.11.0 is no longer supported (then for good)",
        needed=lambda look: look.accepts(_SCHEDULER, "block_size"),
        vllm=">=0.11.1",
        feature="scheduler_block_size",
    ),
    Patch(
        name="scheduler-without-block-size",
        why="Scheduler.__init__() got an unexpected keyword argument 'block_size'",
        upstream="vllm/v1/core/sched/scheduler.py (0.11.0); speculators 0.4.0, __init__()",
        delete_when="vLLM 0.11.0 is no longer supported",
        needed=lambda look: (
            look.generator_says(_PASSES_BLOCK_SIZE)
            and not look.accepts(_SCHEDULER, "block_size")
        ),
        vllm="<0.11.1",
        speculators=">=0.4",
        feature="scheduler_without_block_size",
    ),
)
