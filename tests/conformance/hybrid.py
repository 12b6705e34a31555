"""A hybrid model: linear attention (gated delta net) in three of four layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from .models import Family

HYBRID = Family(
    "qwen3_next",
    partial(
        Qwen3NextConfig,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        # All of them: where a router has to choose, rounding alone moves rows.
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    Qwen3NextForCausalLM,
    4,
    (3, 0, 2),
    None,
)


@contextlib.contextmanager
def float32_states() -> Iterator[None]:
    """The generator has no argument for the dtype of the recurrence.

    vLLM's kernel for CPUs without AMX wants float32 in some releases (0.26.0: LLM fails too),
    and vLLM sets it by itself where there is AMX.
    """
    from vllm.engine.arg_utils import EngineArgs

    if "mamba_ssm_cache_dtype" not in EngineArgs.__dataclass_fields__:
        yield
        return
    made = EngineArgs.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **{"mamba_ssm_cache_dtype": "float32", **kwargs})

    with mock.patch.object(EngineArgs, "__init__", __init__):
        yield


def soil(worker: Any, value: float) -> int:
    """In a worker: fills the recurrent states of every block; says how many tensors there are.

    As if other requests had left them there: blocks are used again when all have been used,
    which takes more requests than a test wants to run.
    """
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    def fill(cache: Any) -> int:
        if not isinstance(cache, torch.Tensor):
            return sum(map(fill, cache))
        # On CPUs without a seed of its own the next model would be another.
        generator = torch.Generator().manual_seed(5)
        noise = torch.randn(cache.shape, generator=generator) * value
        cache.copy_(noise)
        return 1

    worker = worker.worker  # within its wrapper
    layers = worker.vllm_config.compilation_config.static_forward_context
    return sum(
        fill(layers[name].kv_cache)
        for group in worker.model_runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, MambaSpec)
        for name in group.layer_names
    )
