"""What vLLM's rotary embedding makes of positions, as it was built for this engine.

vLLM computes cos and sin once, for as many positions as there may be; transformers computes
them by the length of the sequence where ``rope_scaling`` says so. Read in vLLM 0.11 to 0.33,
``model_executor/layers/rotary_embedding``, and compared with transformers' numbers:

dynamic
    0.11 to 0.21: for a sequence of ``max_position_embeddings * factor`` tokens, however short
    the prompt. From 0.22: the plain embedding, in a table that ends at
    ``max_position_embeddings``; the kernels read what lies behind it.
longrope, su
    0.11: long factors for all sequences of a step if one of them is long. From 0.12: long
    factors for all if ``max_model_len`` exceeds ``original_max_position_embeddings``, else
    short ones. ``attention_factor`` and ``factor`` are ignored.
yarn
    As transformers, but that ``attention_factor`` and ``mscale`` are ignored in 0.16 (not in
    0.32), and that with ``mrope_section`` it is another one (0.11, 0.32; 0.16 can't load it).
default, linear, llama3, deepseek_yarn
    As transformers.

None of this is taken for granted here: the table of the model that was loaded is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError

__all__ = ["check_rope"]

_TABLES = ("cos_sin_cache", "long_short_cos_sin_cache")
_ROWS = 512  # that are compared; the angles of some hundred positions tell any two kinds apart
_APART = 0.02  # tables in bf16 are within 0.4 % of transformers' numbers
_NAMES = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}  # in transformers


def check_rope(
    layers: nn.Module, text_config: Any, max_model_len: int
) -> dict[str, Any] | None:
    """Refuses positions that vLLM has no rotation for; says where it isn't transformers'.

    Args:
        layers: the decoder's.
        text_config: ``vllm_config.model_config.hf_text_config``.
        max_model_len: of the engine, in tokens; a prompt may have one less.

    Returns:
        None if the states are transformers'. Else plain values: ``kind`` of the
        ``rope_scaling``; ``length``, in tokens, of the sequence for which transformers computes
        the same rotation, None if there is none; ``note``, a sentence.

    Raises:
        UnsupportedModelError: prompts of ``max_model_len - 1`` tokens are beyond the table, or
            get a rotation that depends on other prompts.
    """
    found = list(_tables(layers))
    for module, table in found:
        _check_length(module, table, max_model_len)
    parameters = _parameters(text_config)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = "longrope" if kind == "su" else kind
    if kind == "default" or not found:
        return None
    # Gemma 3 has another embedding, that of no rope_scaling, in the layers that slide.
    compared = [
        _compared(module, table, text_config, parameters, kind, max_model_len)
        for module, table in found
    ]
    return None if None in compared else compared[0]


def _tables(layers: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    for module in layers.modules():
        for name in _TABLES:
            table = getattr(module, name, None)
            if isinstance(table, torch.Tensor) and table.dim() >= 2:
                yield module, table


def _check_length(module: Any, table: torch.Tensor, max_model_len: int) -> None:
    name = type(module).__name__
    original = int(getattr(module, "original_max_position_embeddings", 0))
    if hasattr(module, "long_short_cos_sin_cache") and not hasattr(module, "use_long_rope"):
        if max_model_len > original:
            raise UnsupportedModelError(
                f"max_model_len={max_model_len}: with longrope, this vLLM takes the long "
                f"factors for all sequences of a step if one is longer than {original} tokens, "
                f"so that states depend on the other prompts. Use max_model_len={original} or "
                "less, or vLLM 0.12 or later."
            )
        return
    rows = len(_used(module, table))
    if max_model_len - 1 > rows:
        why = ""
        if hasattr(module, "max_trained_positions"):
            why = ' (from 0.22 on, vLLM no longer extends "dynamic" rope_scaling)'
        raise UnsupportedModelError(
            f"max_model_len={max_model_len}: the rotary embedding of this vLLM ({name}) ends "
            f"after {rows} positions{why}, and states beyond them would be computed from "
            f"whatever lies behind it. Use max_model_len={rows + 1} or less."
        )


def _used(module: Any, table: torch.Tensor) -> torch.Tensor:
    """The part of a table that this engine reads; of longrope's, short factors come first."""
    if not hasattr(module, "long_short_cos_sin_cache"):
        return table
    original = module.original_max_position_embeddings
    return table[original:] if getattr(module, "use_long_rope", False) else table[:original]


def _parameters(text_config: Any) -> dict[str, Any]:
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(text_config, name, None)
        if isinstance(value, Mapping) and value:
            return dict(value)
    return {}


def _compared(
    module: Any,
    table: torch.Tensor,
    text_config: Any,
    parameters: dict[str, Any],
    kind: str,
    max_model_len: int,
) -> dict[str, Any] | None:
    used = _used(module, table)
    positions = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    length, few = None, ""
    if kind == "longrope" and getattr(module, "use_long_rope", False):
        # transformers' threshold is the original length, or max_position_embeddings.
        length = max(max_model_len, positions + 1)
        few = f"of up to {module.original_max_position_embeddings} tokens"
    elif kind == "dynamic" and "alpha" in parameters:
        return None  # transformers' HunYuan has it in its own code, as vLLM does
    elif kind == "dynamic" and len(used) > positions:
        length = len(used)
        few = f"of fewer than {length} tokens"
    apart = _distance(used, text_config, kind, length)
    if length is None and (apart is None or apart < _APART):
        return None
    note = (
        f"rope_scaling {kind!r}: the states are those that vLLM serves with "
        f"max_model_len={max_model_len}"
    )
    if length is not None:
        note += f"; transformers computes prompts {few} otherwise"
    if apart is None or apart >= _APART:
        length = None
        note += "; the rotary embedding of this vLLM isn't transformers', for no length"
    return {"kind": kind, "length": length, "note": note + "."}


def _distance(
    table: torch.Tensor, text_config: Any, kind: str, length: int | None
) -> float | None:
    """How far the table is off transformers' for a sequence of that length; None: unknown.

    Args:
        table: [positions, rotary_dim]: cos, then sin.
        length: in tokens; None: of any short one.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    device = torch.device("cpu")
    try:
        compute = ROPE_INIT_FUNCTIONS[_NAMES.get(kind, kind)]
        frequencies, scale = compute(text_config, device, seq_len=length or 1)
    # The model's own code computes it otherwise, with other fields.
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    table = table[:_ROWS].float().cpu()
    at = torch.arange(len(table), dtype=torch.float32, device=device)
    angles = torch.outer(at, frequencies.float())
    right = torch.cat([angles.cos(), angles.sin()], dim=1) * scale
    if right.shape != table.shape:
        return None
    return float((table - right).norm() / right.norm())
