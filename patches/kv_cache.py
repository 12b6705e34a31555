"""The KV cache: planned as vLLM's engine core plans it, with vLLM's own functions.

The generator calls three private helpers and gives every worker the same config. They have
lost an argument (0.12), force hybrid models into one group, check nothing (a cache that
can't hold a prompt came back as zero rows) and know nothing of the layout (0.29) and of the
block sizes (0.20.2) that the engine core settles. vllm/v1/engine/core.py,
``_initialize_kv_caches``, is the model of what is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from ..record import Patch, Symbol, at
from ..session import Session, current_session

if TYPE_CHECKING:
    from ..engine import Engine

_UTILS = "vllm.v1.core.kv_cache_utils"
_CORE = "vllm.v1.engine.core"
_LAYOUT = "vllm.v1.attention.backends.utils:resolve_kv_cache_layout"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"


class Planner:
    """Plans the KV cache of one generator; stands for ``get_kv_cache_config_from_groups``."""

    def __call__(self, *, available_memory: int, **_: Any) -> Any:
        session = current_session()
        engine = session.running_engine
        specs = engine.rpc("get_kv_cache_spec")
        self.before_memory(session, engine, specs)
        self.plan(session, engine, specs, available_memory)
        self.settle_block_sizes(session)
        return session.scheduler_kv_cache_config

    def before_memory(self, session: Session, engine: Engine, specs: list[Any]) -> None:
        """What has to be settled before memory is counted."""

    def plan(
        self, session: Session, engine: Engine, specs: list[Any], available_memory: int
    ) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_kv_cache_configs,
        )

        config = session.vllm_config
        if current_platform.is_cpu():
            # VLLM_CPU_KVCACHE_SPACE; the generator's share of a GPU's memory means nothing.
            available = [int(a) for a in engine.rpc("determine_available_memory")]
        else:
            available = [available_memory] * len(specs)
        try:
            configs = get_kv_cache_configs(config, specs, available)
        except ValueError as error:
            raise InvalidInputError(
                f"The KV cache is too small for max_model_len="
                f"{config.model_config.max_model_len}: {error}"
            ) from error
        session.kv_cache_configs = configs
        session.scheduler_kv_cache_config = generate_scheduler_kv_cache_config(configs)
        config.cache_config.num_gpu_blocks = session.scheduler_kv_cache_config.num_blocks

    def settle_block_sizes(self, session: Session) -> None:
        """Block sizes of the scheduler and of prefix hashes, in tokens."""
        session.block_size = session.vllm_config.cache_config.block_size


def _planner(original: Any) -> Planner:
    return Planner()


def _nothing(original: Any) -> Any:
    # The planner asks the workers itself; specs must reach it as they came.
    return lambda *args, **kwargs: []


def _with_layout(planner: Planner) -> Planner:
    class WithLayout(type(planner)):  # type: ignore[misc]
        def before_memory(self, session: Session, engine: Engine, specs: list[Any]) -> None:
            super().before_memory(session, engine, specs)
            from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

            layout = resolve_kv_cache_layout(
                session.vllm_config,
                engine.run(engine.executor.get_supported_kv_cache_layouts),
                [spec for worker in specs for spec in worker.values()],
            )
            engine.run(engine.executor.set_kv_cache_layout, layout.name)

        def plan(self, session: Session, *args: Any) -> None:
            super().plan(session, *args)
            layout = session.vllm_config.cache_config.kv_cache_layout
            for config in (*session.kv_cache_configs, session.scheduler_kv_cache_config):
                config.kv_cache_layout = layout

    return WithLayout()


def _with_group_block_size(planner: Planner) -> Planner:
    class WithGroupBlockSize(type(planner)):  # type: ignore[misc]
        def settle_block_sizes(self, session: Session) -> None:
            groups = [
                group.kv_cache_spec
                for group in session.scheduler_kv_cache_config.kv_cache_groups
            ]
            # Groups that opt out of prefix caching have blocks of another kind (0.30).
            cached = [s for s in groups if getattr(s, "prefix_cacheable", True)] or groups
            if cached:
                session.vllm_config.cache_config.block_size = min(s.block_size for s in cached)
            super().settle_block_sizes(session)

    return WithGroupBlockSize()


def _with_hash_block_size(planner: Planner) -> Planner:
    class WithHashBlockSize(type(planner)):  # type: ignore[misc]
        def settle_block_sizes(self, session: Session) -> None:
            super().settle_block_sizes(session)
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

            session.block_size, session.hash_block_size = resolve_kv_cache_block_sizes(
                session.scheduler_kv_cache_config, session.vllm_config
            )

    return WithHashBlockSize()


def _with_alignment(planner: Planner) -> Planner:
    class WithAlignment(type(planner)):  # type: ignore[misc]
        def settle_block_sizes(self, session: Session) -> None:
            super().settle_block_sizes(session)
            from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens

            alignment = resolve_cache_hit_alignment_tokens(
                session.scheduler_kv_cache_config,
                session.vllm_config,
                session.block_size,
                session.hash_block_size,
            )
            for config in (*session.kv_cache_configs, session.scheduler_kv_cache_config):
                config.hash_block_size = session.hash_block_size
                config.cache_hit_alignment_tokens = alignment

    return WithAlignment()


def _with_spec_registration(planner: Planner) -> Planner:
    class WithSpecRegistration(type(planner)):  # type: ignore[misc]
        def before_memory(self, session: Session, engine: Engine, specs: list[Any]) -> None:
            from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

            register_all_kvcache_specs(session.vllm_config)
            super().before_memory(session, engine, specs)
            if any(getattr(s, "non_causal", False) for w in specs for s in w.values()):
                session.vllm_config.scheduler_config.enable_chunked_prefill = False

    return WithSpecRegistration()


def _with_warm_up(executor: Any) -> Any:
    class MultiprocExecutor(executor):  # type: ignore[misc]
        def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
            super().initialize_from_config(kv_cache_configs)
            engine = self._session.running_engine
            engine.run(engine.executor.compile_or_warm_up_model)

    return MultiprocExecutor


_SEAM = at("get_kv_cache_config_from_groups")

PATCHES = (
    Patch(
        name="kv-cache-config",
        why=(
            "get_kv_cache_config_from_groups lost an argument (0.12), hybrid models are "
            "forced into one group, and a cache that can't hold a prompt is not noticed"
        ),
        upstream="vllm/v1/core/kv_cache_utils.py; engine/core.py, _initialize_kv_caches",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={
            _SEAM: _planner,
            at("unify_hybrid_kv_cache_specs"): _nothing,
            at("_get_kv_cache_groups_uniform_spec"): _nothing,
        },
        discards=(
            _SEAM,
            at("unify_hybrid_kv_cache_specs"),
            at("_get_kv_cache_groups_uniform_spec"),
        ),
        relies_on=(
            Symbol(
                f"{_UTILS}:get_kv_cache_configs",
                ("vllm_config", "kv_cache_specs", "available_memory"),
                "the KV cache can't be planned",
            ),
            Symbol(f"{_UTILS}:generate_scheduler_kv_cache_config", ("kv_cache_configs",)),
            Symbol(f"{_EXECUTOR}.initialize_from_config", ("kv_cache_configs",)),
        ),
    ),
    Patch(
        name="kv-spec-registration",
        why="specs of newer attention kinds are unknown until they are registered",
        upstream="vllm/v1/engine/core.py, register_all_kvcache_specs (0.23)",
        delete_when="vLLM before 0.23 is no longer supported (then for good)",
        needed=lambda look: look.has(
            "vllm.v1.core.single_type_kv_cache_manager:register_all_kvcache_specs"
        ),
        vllm=">=0.23",
        replaces={_SEAM: _with_spec_registration},
    ),
    Patch(
        name="kv-cache-layout",
        why="ValueError: KV cache layout has not been resolved yet",
        upstream="vllm/v1/engine/core.py, resolve_kv_cache_layout (0.29)",
        delete_when="vLLM before 0.29 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_EXECUTOR}.get_supported_kv_cache_layouts"),
        vllm=">=0.29",
        replaces={_SEAM: _with_layout},
        relies_on=(
            Symbol(_LAYOUT, if_gone="the layout can't be resolved"),
            Symbol(f"{_EXECUTOR}.set_kv_cache_layout"),
        ),
    ),
    Patch(
        name="kv-group-block-size",
        why=(
            "the block size of the platform's attention kernel is settled by the KV groups; "
            "a scheduler with another one is silently accepted up to 0.20 and fails later"
        ),
        upstream="vllm/v1/engine/core.py, _initialize_kv_caches (0.18)",
        delete_when="vLLM before 0.18 is no longer supported (then for good)",
        needed=lambda look: look.sources.says(_CORE, "cache_config.block_size = min("),
        vllm=">=0.18",
        replaces={_SEAM: _with_group_block_size},
    ),
    Patch(
        name="kv-hash-block-size",
        why="the scheduler needs the block size that resolve_kv_cache_block_sizes settles",
        upstream="vllm/v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes (0.20.2)",
        delete_when="vLLM before 0.20 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_UTILS}:resolve_kv_cache_block_sizes"),
        vllm=">=0.20",
        replaces={_SEAM: _with_hash_block_size},
    ),
    Patch(
        name="kv-hit-alignment",
        why="KVCacheConfig.hash_block_size and cache_hit_alignment_tokens stay unset",
        upstream="vllm/v1/engine/core.py, _initialize_kv_caches (0.32)",
        delete_when="vLLM before 0.32 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_UTILS}:resolve_cache_hit_alignment_tokens"),
        vllm=">=0.32",
        replaces={_SEAM: _with_alignment},
    ),
    Patch(
        name="warm-up",
        why="initialize_from_config no longer compiles and warms up the model",
        upstream="vllm/v1/executor/abstract.py, compile_or_warm_up_model (0.27)",
        delete_when="vLLM before 0.27 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_EXECUTOR}.compile_or_warm_up_model"),
        vllm=">=0.27",
        replaces={at("MultiprocExecutor"): _with_warm_up},
    ),
)
