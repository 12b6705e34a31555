"""Harness only: what vLLM 0.16's CPU backend computes wrongly, or can't, for some families.

None of this is part of vllm-compat, and nothing of it is on unless a family's record names it.
Each workaround makes vLLM's own model code run on a CPU as it is meant to; the layers, their
order and the residual convention stay vLLM's.

They reach spawned workers as a ``vllm.general_plugins`` entry point, which vLLM loads in every
one of its processes: ``install`` writes a distribution with nothing but that entry point, and
the test puts it on the ``PYTHONPATH`` of the generator's process.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

VARIABLE = "VLLM_COMPAT_TEST_WORKAROUNDS"


@dataclass(frozen=True)
class Workaround:
    """``why`` says what is wrong without it; ``install`` changes vLLM in this process."""

    why: str
    install: Callable[[], None]


def write_entry_point(folder: Path) -> None:
    """Write a distribution whose only content is the entry point of ``activate``."""
    info = folder / "vllm_compat_test_families-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-compat-test-families\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\n"
        "vllm_compat_test_families = families.cpu_workarounds:activate\n"
    )


def activate() -> None:
    """Install what the environment names; called by vLLM in each of its processes."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        (WORKAROUNDS.get(name) or OTHERS[name]).install()


def keep_float32() -> None:
    import torch
    from vllm.config import model

    def resolve(*_args: Any, **_kwargs: Any) -> torch.dtype:
        return torch.float32

    model._resolve_auto_dtype = resolve


def native_rope() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def sigmoid_routing() -> None:
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    original = cpu_fused_moe.select_experts
    if getattr(original, "is_workaround", False):
        return

    def select_experts(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("scoring_func") != "sigmoid" or kwargs.get("use_grouped_topk"):
            return original(*args, **kwargs)
        scores = kwargs["router_logits"].float().sigmoid()
        bias = kwargs.get("e_score_correction_bias")
        chosen = scores if bias is None else scores + bias
        ids = chosen.topk(kwargs["top_k"], dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if kwargs["renormalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * kwargs.get("routed_scaling_factor", 1.0), ids.int()

    select_experts.is_workaround = True  # type: ignore[attr-defined]
    cpu_fused_moe.select_experts = select_experts


def router_weight_on_input() -> None:
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    original = cpu_fused_moe.CPUFusedMOE.__call__
    if getattr(original, "is_workaround", False):
        return
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["apply_router_weight_on_input"]:
            return original(*args, **kwargs)
        assert given["top_k"] == 1
        x = given["x"]
        weights, ids = cpu_fused_moe.select_experts(
            hidden_states=x,
            router_logits=given["router_logits"],
            use_grouped_topk=given["use_grouped_topk"],
            top_k=given["top_k"],
            renormalize=given["renormalize"],
            custom_routing_function=given["custom_routing_function"],
            scoring_func=given["scoring_func"],
        )
        return given["self"].forward_method(
            given["layer"],
            x * weights.to(x.dtype),
            weights.new_ones(weights.shape),
            ids,
            given["activation"],
            given["global_num_experts"],
        )

    call.is_workaround = True  # type: ignore[attr-defined]
    cpu_fused_moe.CPUFusedMOE.__call__ = call


def int4_dequantised() -> None:
    import torch
    from torch.nn import functional
    from vllm.model_executor.layers.quantization.compressed_tensors import (
        compressed_tensors_moe as moe,
    )
    from vllm.model_executor.layers.quantization.kernels.mixed_precision.cpu import (
        CPUWNA16LinearKernel,
    )

    def unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[..., rows, columns / 8] int32 and [..., rows, groups] to [..., rows, columns]."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        values = ((packed[..., None] >> shifts) & 15).flatten(-2) - 8
        groups = values.unflatten(-1, (scale.shape[-1], -1)).to(scale.dtype)
        return (groups * scale[..., None]).flatten(-2)

    def process_linear(_self: Any, layer: Any) -> None:
        dense = unpack(layer.weight_packed.data, layer.weight_scale.data)
        layer.dequantised = torch.nn.Parameter(dense, requires_grad=False)

    def apply_linear(_self: Any, layer: Any, x: Any, bias: Any = None) -> torch.Tensor:
        return functional.linear(x, layer.dequantised, bias)

    def process_experts(_self: Any, layer: Any) -> None:
        for name in ("w13", "w2"):
            packed = getattr(layer, f"{name}_weight_packed").data.transpose(1, 2)
            scale = getattr(layer, f"{name}_weight_scale").data.transpose(1, 2)
            dense = torch.nn.Parameter(unpack(packed, scale), requires_grad=False)
            setattr(layer, f"{name}_dequantised", dense)

    def apply_experts(_self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        out = torch.zeros_like(x)
        for expert in range(layer.w13_dequantised.shape[0]):
            share = (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True)
            gate, up = functional.linear(x, layer.w13_dequantised[expert]).chunk(2, -1)
            inner = functional.silu(gate) * up
            out += functional.linear(inner, layer.w2_dequantised[expert]) * share.to(x.dtype)
        return out

    CPUWNA16LinearKernel.process_weights_after_loading = process_linear
    CPUWNA16LinearKernel.apply_weights = apply_linear
    # vLLM prefers Marlin, a CUDA kernel, without asking whether this is CUDA.
    moe.check_moe_marlin_supports_layer = lambda *_args: False
    method = moe.CompressedTensorsWNA16MoEMethod
    method.process_weights_after_loading = process_experts
    method.apply = apply_experts


def gated_delta_net() -> None:
    import torch
    from torch.nn import functional
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models import qwen3_next

    def causal_conv1d(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        activation: str,
        conv_states: torch.Tensor,
        has_initial_state: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """[channels, tokens] to the same; keeps the last inputs of each sequence."""
        assert activation == "silu"
        out = torch.empty_like(x)
        kept = weight.shape[1] - 1
        starts = query_start_loc.tolist()
        for i, (start, end) in enumerate(pairwise(starts)):
            slot = cache_indices[i]
            before = conv_states[slot, :, -kept:].to(x.dtype)
            before = before if has_initial_state[i] else torch.zeros_like(before)
            seen = torch.cat([before, x[:, start:end]], dim=1)
            groups = weight.shape[0]
            value = functional.conv1d(seen[None], weight[:, None], bias, groups=groups)[0]
            out[:, start:end] = functional.silu(value)
            conv_states[slot] = seen[:, -kept:].to(conv_states.dtype)
        return out

    def causal_conv1d_update(
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        *,
        conv_state_indices: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """A decode step: a token for each sequence, which goes on from what its block holds."""
        return causal_conv1d(
            x.T,
            weight,
            bias,
            activation=activation,
            conv_states=conv_state,
            has_initial_state=torch.ones(len(x), dtype=torch.bool),
            cache_indices=conv_state_indices,
            query_start_loc=torch.arange(len(x) + 1),
        ).T

    def gating(a_log: Any, a: Any, b: Any, dt_bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
        decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
        return decay[None], b.float().sigmoid()[None]

    def delta_rule(
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        cu_seqlens: torch.Tensor,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrence, token by token."""
        repeat = v.shape[2] // k.shape[2]

        def unit(x: torch.Tensor) -> torch.Tensor:
            x = x[0].float().repeat_interleave(repeat, 1)
            return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

        query, key, value = unit(q) * q.shape[-1] ** -0.5, unit(k), v[0].float()
        out, states = torch.empty_like(value), []
        starts = cu_seqlens.tolist()
        for i, (start, end) in enumerate(pairwise(starts)):
            state = initial_state[i].float()
            for t in range(start, end):
                state = state * g[0, t].exp()[:, None, None]
                known = torch.einsum("hkv,hk->hv", state, key[t])
                change = (value[t] - known) * beta[0, t][:, None]
                state = state + torch.einsum("hk,hv->hkv", key[t], change)
                out[t] = torch.einsum("hkv,hk->hv", state, query[t])
            states.append(state)
        return out[None].to(v.dtype), torch.stack(states)

    def recurrent_delta_rule(
        *, initial_state: torch.Tensor, ssm_state_indices: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A decode step: it goes on from what the blocks hold, and writes there."""
        slots = ssm_state_indices[: len(given["cu_seqlens"]) - 1]
        out, states = delta_rule(initial_state=initial_state[slots], **given)
        initial_state[slots] = states.to(initial_state.dtype)
        return out, initial_state

    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, *args: Any, **kwargs: Any) -> None:
        # The convolution's weight is a linear layer's only in name: it has three dimensions.
        if layer.weight.dim() == 2:
            original(layer, *args, **kwargs)

    if not getattr(original, "is_workaround", False):
        dispatch.is_workaround = True  # type: ignore[attr-defined]
        utils.dispatch_cpu_unquantized_gemm = dispatch
    qwen3_next.causal_conv1d_fn = causal_conv1d
    qwen3_next.causal_conv1d_update = causal_conv1d_update
    qwen3_next.fused_gdn_gating = gating
    qwen3_next.chunk_gated_delta_rule = delta_rule
    qwen3_next.fused_recurrent_gated_delta_rule = recurrent_delta_rule


def experts_as_operators() -> None:
    from vllm.model_executor.layers.fused_moe import layer

    class NotACpu:
        """Says so where the layer decides between operator and direct call; else the same."""

        def __init__(self, platform: Any) -> None:
            self._platform = platform

        def __getattr__(self, name: str) -> Any:
            return getattr(self._platform, name)

        def is_cpu(self) -> bool:
            return False

    layer.current_platform = NotACpu(layer.current_platform)


WORKAROUNDS: Mapping[str, Workaround] = {
    "keep_float32": Workaround(
        "vLLM computes a float32 checkpoint in bfloat16 when the dtype is 'auto', and the "
        "generator always says 'auto'. Float32 shows errors that rounding and flips of the "
        "experts' routing hide.",
        keep_float32,
    ),
    "native_rope": Workaround(
        "The CPU rope kernel is wrong for DeepSeek's interleaved default rope (0.09 to 0.32 "
        "off at the first layer); vLLM's own torch version of it is right.",
        native_rope,
    ),
    "sigmoid_routing": Workaround(
        "The CPU MoE asserts softmax scoring where experts aren't grouped; MiniMax-M2 has "
        "sigmoid scoring with a correction.",
        sigmoid_routing,
    ),
    "router_weight_on_input": Workaround(
        "The CPU MoE asserts that the router's weight goes onto the output; Llama 4 puts it "
        "onto the input.",
        router_weight_on_input,
    ),
    "int4_dequantised": Workaround(
        "There is no INT4 kernel in the CPU wheel (its operator is missing, and the kernel "
        "reads other names than compressed-tensors writes), and none for INT4 experts: the "
        "weights are loaded packed by vLLM's own loader, then dequantised.",
        int4_dequantised,
    ),
    "gated_delta_net": Workaround(
        "The linear attention of Qwen3-Next (convolution and gated delta rule) has no CPU "
        "kernel, and loading trips over the convolution's weight: both are plain torch here. "
        "The states' cache, its groups, and what counts as a decode step are vLLM's.",
        gated_delta_net,
    ),
}

#: Not for want of a kernel: other paths of vLLM, which a CPU doesn't take by itself.
OTHERS: Mapping[str, Workaround] = {
    "experts_as_operators": Workaround(
        "On a GPU the experts of a layer are a custom operator, which in vLLM 0.16 takes the "
        "layer's name from a counter in the forward context; a CPU calls them directly.",
        experts_as_operators,
    ),
}
