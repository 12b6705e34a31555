"""The KV cache: planned as vLLM's engine core plans it, with vLLM's own functions.

The generator calls three private helpers and gives every worker the same config. They have
lost an argument (0.12), force hybrid models into one group, check nothing (a cache that
can't hold a prompt came back as zero rows) and know nothing of the layout (0.29) and of the
block sizes (0.20.2) that the engine core settles. vllm/v1/engine/core.py,
``_initialize_kv_caches``, is the model of what is done here.
"""

from __future__ import annotations

from typing import Any

from ..kv_planning import plan_kv_cache
from ..record import Patch, Symbol, at
from ..session import current_session

_UTILS = "vllm.v1.core.kv_cache_utils"
_PLANNING = "vllm.v1.core.kv_cache_planning"
_CORE = "vllm.v1.engine.core"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
_LAYOUT = "vllm.v1.attention.backends.utils:resolve_kv_cache_layout"
_EXECUTOR = "vllm.v1.executor.abstract:Executor"


def _planned(original: Any) -> Any:
    def get_kv_cache_config_from_groups(*, available_memory: int, **_: Any) -> Any:
        session = current_session()
        session.kv_cache = plan_kv_cache(
            session.features, session.vllm_config, session.running_engine, available_memory
        )
        return session.kv_cache.scheduler_config

    return get_kv_cache_config_from_groups


def _nothing(original: Any) -> Any:
    # The plan asks the workers itself; specs must reach it as they came.
    return lambda *args, **kwargs: []


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
            _SEAM: _planned,
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
                "<0.33",
            ),
            Symbol(f"{_UTILS}:generate_scheduler_kv_cache_config", ("kv_cache_configs",)),
            Symbol(f"{_EXECUTOR}.initialize_from_config", ("kv_cache_configs",)),
        ),
    ),
    Patch(
        name="kv-planning-module",
        why="KV caches are planned elsewhere, from groups that the engine core makes first",
        upstream="vllm/v1/core/kv_cache_planning.py; engine/core.py (0.33)",
        delete_when="vLLM before 0.33 is no longer supported (then for good)",
        needed=lambda look: not look.has(f"{_UTILS}:get_kv_cache_configs"),
        vllm=">=0.33",
        feature="kv_planning_module",
        relies_on=(
            Symbol(
                f"{_PLANNING}:get_kv_cache_configs",
                ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups"),
                "the KV cache can't be planned",
            ),
            Symbol(f"{_PLANNING}:get_global_kv_cache_groups"),
            Symbol("vllm.config:VllmConfig.adjust_dcp_kv_cache_interleave_size"),
            Symbol(
                f"{_EXECUTOR}.set_kv_cache_layout",
                ("layout_name", "cp_kv_cache_interleave_size"),
            ),
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
        feature="kv_spec_registration",
    ),
    Patch(
        name="kv-cache-layout",
        why="ValueError: KV cache layout has not been resolved yet",
        upstream="vllm/v1/engine/core.py, resolve_kv_cache_layout (0.29)",
        delete_when="vLLM before 0.29 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_EXECUTOR}.get_supported_kv_cache_layouts"),
        vllm=">=0.29",
        feature="kv_cache_layout",
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
        feature="group_block_size",
    ),
    Patch(
        name="kv-hash-block-size",
        why="the scheduler needs the block size that resolve_kv_cache_block_sizes settles",
        upstream="vllm/v1/core/kv_cache_utils.py, resolve_kv_cache_block_sizes (0.20.2)",
        delete_when="vLLM before 0.20 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_UTILS}:resolve_kv_cache_block_sizes"),
        vllm=">=0.20",
        feature="hash_block_size",
    ),
    Patch(
        name="kv-hit-alignment",
        why="KVCacheConfig.hash_block_size and cache_hit_alignment_tokens stay unset",
        upstream="vllm/v1/engine/core.py, _initialize_kv_caches (0.32)",
        delete_when="vLLM before 0.32 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_UTILS}:resolve_cache_hit_alignment_tokens"),
        vllm=">=0.32",
        feature="cache_hit_alignment",
    ),
    Patch(
        name="mla-whole-prompts",
        why=(
            "with MLA on the V2 model runner, the second chunk of a prompt loses the first one "
            "unless it stands in front of its batch; its rows are wrong, without an error"
        ),
        upstream=(
            "vllm/model_executor/layers/attention/mla_attention.py, "
            "prefill_tokens_with_context (0.20 to 0.27); "
            "vllm/v1/worker/gpu/model_runner.py, sort_batch_req_ids"
        ),
        delete_when="vLLM before 0.28 is no longer supported",
        needed=lambda look: look.sources.says(_MLA, "prefill_tokens_with_context = "),
        vllm=">=0.20,<0.28",
        feature="mla_context_in_front",
        relies_on=(
            Symbol("vllm.config:ModelConfig.use_mla"),
            Symbol("vllm.config:SchedulerConfig.enable_chunked_prefill"),
        ),
    ),
    Patch(
        name="warm-up",
        why="initialize_from_config no longer compiles and warms up the model",
        upstream="vllm/v1/executor/abstract.py, compile_or_warm_up_model (0.27)",
        delete_when="vLLM before 0.27 is no longer supported (then for good)",
        needed=lambda look: look.has(f"{_EXECUTOR}.compile_or_warm_up_model"),
        vllm=">=0.27",
        feature="separate_warm_up",
    ),
)
