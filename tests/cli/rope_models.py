"""Tiny models whose rotary embedding depends on the length of the sequence."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from conformance.models import Family, write_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

ORIGINAL, LONGEST = 64, 512
"""Tokens: from where on longrope takes its long factors; max_position_embeddings."""

_HALF = 16  # of a head's 32 columns


def dynamic(folder: Path) -> Path:
    """A Llama for 64 tokens, extended to 256 by "dynamic" NTK scaling."""
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    changes = {"rope_scaling": scaling, "max_position_embeddings": ORIGINAL}
    config = partial(_changed, LlamaConfig, changes)
    write_checkpoint(Family("dynamic", config, LlamaForCausalLM, 4, (), None), folder)
    return folder


def yarn(folder: Path) -> Path:
    """A Llama with an attention_factor, which vLLM doesn't read before 0.30."""
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 0.5,
    }
    changes = {"rope_scaling": scaling, "max_position_embeddings": 4 * ORIGINAL}
    config = partial(_changed, LlamaConfig, changes)
    write_checkpoint(Family("yarn", config, LlamaForCausalLM, 4, (), None), folder)
    return folder


def longrope(folder: Path) -> Path:
    """A Phi-3 for 64 tokens, extended to 512 by "longrope"."""
    scaling = {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(_HALF)],
        "long_factor": [2.0 + 0.7 * i for i in range(_HALF)],
    }
    changes = {
        "rope_scaling": scaling,
        "original_max_position_embeddings": ORIGINAL,
        "max_position_embeddings": LONGEST,
        "pad_token_id": None,
    }
    config = partial(_changed, Phi3Config, changes)
    write_checkpoint(Family("longrope", config, Phi3ForCausalLM, 4, (), None), folder)
    return folder


def _changed(cls: Any, changes: dict[str, Any], **arguments: Any) -> Any:
    return cls(**{**arguments, **changes})
