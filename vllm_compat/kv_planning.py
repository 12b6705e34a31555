"""Plans the KV cache as vLLM's engine core does, with vLLM's own functions.

``vllm/v1/engine/core.py``, ``_initialize_kv_caches``, is the model. Read the two side by side
when a release changes one of these steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import InvalidInputError, UnsupportedModelError
from .features import Features

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["KVCachePlan", "keep_prompts_whole", "plan_kv_cache"]

_V2_RUNNER = "vllm.v1.worker.gpu.model_runner"


@dataclass(frozen=True)
class KVCachePlan:
    """The KV cache of one generator.

    Attributes:
        worker_configs: vLLM's ``KVCacheConfig`` for each worker, by rank.
        scheduler_config: the one that the scheduler gets.
        block_size: tokens in a block of the scheduler.
        hash_block_size: tokens that one prefix hash covers; None before vLLM 0.20.
    """

    worker_configs: list[Any]
    scheduler_config: Any
    block_size: int
    hash_block_size: int | None = None


def plan_kv_cache(
    features: Features, vllm_config: Any, engine: Engine, available_memory: int
) -> KVCachePlan:
    """Plans the KV cache of all workers.

    Args:
        features: of this vLLM.
        vllm_config: its cache config gets the number of blocks and the block size.
        engine: its workers are asked for their KV cache specs.
        available_memory: bytes for the KV cache of each worker. On a CPU the workers say
            themselves how much there is (``VLLM_CPU_KVCACHE_SPACE``).

    Raises:
        InvalidInputError: the memory doesn't hold one sequence of ``max_model_len``.
        UnsupportedModelError: from :func:`keep_prompts_whole`.
    """
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    cache_config = vllm_config.cache_config
    if features.kv_spec_registration:
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        register_all_kvcache_specs(vllm_config)

    if features.mla_context_in_front:
        keep_prompts_whole(vllm_config, engine.description["runner"])

    specs = engine.rpc("get_kv_cache_spec")
    all_specs = [spec for worker in specs for spec in worker.values()]
    if any(getattr(spec, "non_causal", False) for spec in all_specs):
        vllm_config.scheduler_config.enable_chunked_prefill = False

    groups: tuple[Any, ...] = ()
    layout_arguments: tuple[Any, ...] = ()
    if features.kv_planning_module:
        from vllm.v1.core.kv_cache_planning import (
            get_global_kv_cache_groups,
            get_kv_cache_configs,
        )

        groups = (get_global_kv_cache_groups(vllm_config, specs),)
        vllm_config.adjust_dcp_kv_cache_interleave_size(*groups)
        layout_arguments = (vllm_config.parallel_config.cp_kv_cache_interleave_size,)
    else:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    if features.kv_cache_layout:
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

        executor = engine.executor
        supported = engine.run(executor.get_supported_kv_cache_layouts)
        layout = resolve_kv_cache_layout(vllm_config, supported, all_specs)
        engine.run(executor.set_kv_cache_layout, layout.name, *layout_arguments)

    if current_platform.is_cpu():
        available = [int(a) for a in engine.rpc("determine_available_memory")]
    else:
        available = [available_memory] * len(specs)
    try:
        worker_configs = get_kv_cache_configs(vllm_config, specs, available, *groups)
    except ValueError as error:
        raise InvalidInputError(
            "The KV cache is too small for max_model_len="
            f"{vllm_config.model_config.max_model_len}: {error}"
        ) from error
    scheduler_config = generate_scheduler_kv_cache_config(worker_configs)
    configs = (*worker_configs, scheduler_config)
    cache_config.num_gpu_blocks = scheduler_config.num_blocks
    if features.kv_cache_layout:
        for config in configs:
            config.kv_cache_layout = cache_config.kv_cache_layout

    if features.group_block_size:
        of_groups = [group.kv_cache_spec for group in scheduler_config.kv_cache_groups]
        # Groups that opt out of prefix caching have blocks of another kind (0.30).
        cached = [s for s in of_groups if getattr(s, "prefix_cacheable", True)] or of_groups
        if cached:
            cache_config.block_size = min(spec.block_size for spec in cached)

    block_size, hash_block_size = cache_config.block_size, None
    if features.hash_block_size:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        block_size, hash_block_size = resolve_kv_cache_block_sizes(
            scheduler_config, vllm_config
        )
    if features.cache_hit_alignment:
        from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens

        alignment = resolve_cache_hit_alignment_tokens(
            scheduler_config, vllm_config, block_size, hash_block_size
        )
        for config in configs:
            config.hash_block_size = hash_block_size
            config.cache_hit_alignment_tokens = alignment
    return KVCachePlan(worker_configs, scheduler_config, block_size, hash_block_size)


def keep_prompts_whole(vllm_config: Any, runner: str) -> None:
    """MLA on the V2 runner: a prompt is computed in one scheduler step.

    ``prefill_tokens_with_context`` (vllm/model_executor/layers/attention/mla_attention.py) is
    right where requests that go on stand in front of those that begin. The V1 runner sorts them
    so; the V2 runner sorts by number of tokens. The second chunk of a prompt then loses the
    first one, without an error: on an H200 with 0.26.0, 2,008 of 2,100 rows of a DeepSeek-V2.

    Args:
        vllm_config: its scheduler config is changed, before there is a scheduler.
        runner: module of the workers' model runner.

    Raises:
        UnsupportedModelError: a scheduler step has fewer tokens than a prompt may have.
    """
    if runner != _V2_RUNNER or not vllm_config.model_config.use_mla:
        return
    scheduler, length = vllm_config.scheduler_config, vllm_config.model_config.max_model_len
    if scheduler.max_num_batched_tokens < length:
        raise UnsupportedModelError(
            "This vLLM's V2 model runner mixes up the chunks of a prompt in models with MLA. "
            f"Use max_num_batched_tokens={length} (max_model_len) or more, so that there are "
            "none, or the V1 runner (VLLM_USE_V2_MODEL_RUNNER=0)."
        )
    scheduler.enable_chunked_prefill = False
