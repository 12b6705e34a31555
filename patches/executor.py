"""``MultiprocExecutor``: runs a batch to its end, and answers as the generator expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..record import Patch, Symbol, at
from ..session import Session, current_session
from ..state import options
from ..worker_environment import starting_workers
from .results import as_generator_reads

if TYPE_CHECKING:
    from ..batch import Batch

_EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"


class CapturingExecutor:
    """Stands in for vLLM's executor inside one generator.

    The generator asks for steps one by one; the first ``execute_model`` runs the whole
    batch, so that no prompt is cut off by the generator's own loop, whose bookkeeping
    (0.3.0 aborts after one step, 0.4.0 never frees a slot) doesn't matter any more.
    """

    def __init__(self, vllm_config: Any, build: Callable[[Any], Any]) -> None:
        from ..engine import Engine

        session = current_session()
        with starting_workers(vllm_config):
            session.engine = Engine(lambda: build(vllm_config), vllm_config, session.features)
        self._session: Session = session

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The generator's RPCs: those about capture are answered here."""
        engine = self._session.running_engine
        if method == "_setup_hidden_states_capture":
            (layer_ids,) = kwargs["args"]
            self._session.layer_ids = list(layer_ids)
            if self._session.features.contiguous_norms:
                from ..worker.norms import contiguous_norms

                engine.rpc(contiguous_norms)
            engine.set_up(list(layer_ids), options().transport)
            return None
        if method in ("_reset_capture", "_set_request_metadata"):
            return None  # each batch has an account of its own
        if method == "_get_captured_states":
            return as_generator_reads(self._batch, self._session.features)
        return engine.rpc(method, *kwargs.pop("args", ()), **kwargs.pop("kwargs", {}))

    def execute_model(self, scheduler_output: Any) -> None:
        """Runs this scheduler step and all further ones that the batch needs."""
        self._session.running_engine.compute(self._batch, scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> None:
        """Nothing: no token is wanted (0.4.0 asks for it)."""

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Gives each worker its own KV cache config."""
        plan, engine = self._session.kv_cache, self._session.running_engine
        engine.initialize(plan.worker_configs if plan is not None else kv_cache_configs)
        if self._session.features.separate_warm_up:
            engine.run(engine.executor.compile_or_warm_up_model)

    def shutdown(self) -> None:
        """Ends the workers."""
        self._session.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers on this machine."""
        return self._session.running_engine.worker_pids

    @property
    def _batch(self) -> Batch:
        if self._session.batch is None:
            raise RuntimeError("a scheduler step outside of generate()")
        return self._session.batch


def _capturing(original: Any) -> Any:
    def build(vllm_config: Any) -> Any:
        if vllm_config.parallel_config.distributed_executor_backend == "mp":
            return original(vllm_config=vllm_config)
        from vllm.v1.executor.abstract import Executor

        return Executor.get_class(vllm_config)(vllm_config=vllm_config)

    class MultiprocExecutor(CapturingExecutor):
        def __init__(self, vllm_config: Any) -> None:
            super().__init__(vllm_config, build)

    return MultiprocExecutor


PATCHES = (
    Patch(
        name="row-attribution",
        why=(
            "rows are cut apart by running offsets (0.3.0) or by bookkeeping that forgets "
            "preempted and waiting requests (0.4.0), so that they land in other sequences; "
            "and the worker's own forward loop breaks on models whose embedding is called "
            "embed_input_ids (0.11.1), wraps, scales or lacks SupportsEagle3"
        ),
        upstream="speculators#279; speculators 0.3.0 to 0.4.0.1, custom_worker.py",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={at("MultiprocExecutor"): _capturing},
        relies_on=(
            Symbol(_EXECUTOR, ("vllm_config",), "workers can't be started"),
            Symbol(
                f"{_EXECUTOR}.collective_rpc",
                ("method", "args", "kwargs", "unique_reply_rank"),
                "workers can't be asked",
            ),
            Symbol(f"{_EXECUTOR}.shutdown"),
            Symbol("vllm.v1.executor.abstract:Executor.get_class"),
            Symbol("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids"),
            Symbol(f"{_RUNNER}.get_model", if_gone="the model can't be hooked"),
            Symbol(f"{_RUNNER}.input_batch", if_gone="rows have no owner"),
            Symbol(f"{_RUNNER_V2}.prepare_inputs", (), "rows have no owner", ">=0.12"),
            Symbol(f"{_RUNNER_V2}.sample_tokens", (), "chunks start at 0 again", ">=0.12"),
            Symbol(
                "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
                (),
                "rows have no owner",
                ">=0.12",
            ),
            Symbol("vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens"),
            Symbol("vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs"),
            Symbol("vllm.v1.core.sched.output:NewRequestData.num_computed_tokens"),
            Symbol("vllm.v1.core.sched.output:CachedRequestData.req_ids"),
            Symbol("vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens"),
            Symbol("vllm.v1.core.sched.output:CachedRequestData.new_block_ids"),
            Symbol("vllm.v1.core.sched.output:NewRequestData.block_ids"),
            Symbol(f"{_RUNNER}.kv_cache_config", if_gone="blocks of others aren't cleaned"),
            Symbol("vllm.v1.kv_cache_interface:MambaSpec", if_gone="states of others are used"),
            Symbol(
                "vllm.forward_context:set_forward_context",
                ("attn_metadata", "vllm_config", "num_tokens"),
            ),
        ),
    ),
    Patch(
        name="two-phase-step",
        why=(
            "execute_model returns None, keeps its batch and refuses the next step until "
            "sample_tokens was called, with and without async scheduling"
        ),
        upstream="vllm/v1/worker/gpu_model_runner.py, execute_model_state (0.11.1)",
        delete_when="vLLM 0.11.0 is the only one supported, or execute_model samples again",
        needed=lambda look: look.has(f"{_RUNNER}.sample_tokens"),
        vllm=">=0.11.1",
        side="worker",
        feature="two_phase_step",
        relies_on=(Symbol(f"{_RUNNER}.execute_model_state", if_gone="the second step fails"),),
    ),
    Patch(
        name="reply-rank",
        why=(
            "collective_rpc(unique_reply_rank=r) gives the reply itself, not a list of one: "
            "[0] then takes the first layer, and asking a tensor for its truth raises"
        ),
        upstream="vllm/v1/executor/multiproc_executor.py, collective_rpc (0.11.1)",
        delete_when="vLLM 0.11.0 is no longer supported (then for good)",
        needed=lambda look: look.accepts(f"{_EXECUTOR}.collective_rpc", "kv_output_aggregator"),
        vllm=">=0.11.1",
        feature="bare_reply",
    ),
)
