"""Checkpoints with random weights, for benchmarks: a forward takes as long with any weights.

Eight billion parameters, 16 GB: Qwen3-8B's shape, or eight experts on attention of that shape.
With --small 120 or 180 million.

    python benchmarks/make_model.py dense FOLDER
    python benchmarks/make_model.py moe FOLDER --small
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

WORDS = 512


def config(kind: str, small: bool) -> PretrainedConfig:
    shape: dict[str, Any] = {
        "vocab_size": 4096 if small else 151936,
        "hidden_size": 1024 if small else 4096,
        "intermediate_size": 2048 if small else 12288,
        "num_hidden_layers": 8 if small else 36,
        "num_attention_heads": 16 if small else 32,
        "num_key_value_heads": 8,
        "head_dim": 64 if small else 128,
        "max_position_embeddings": 40960,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch.bfloat16,
    }
    if kind == "dense":
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(
        **shape,
        num_experts=16 if small else 8,
        num_experts_per_tok=4 if small else 2,
        moe_intermediate_size=512 if small else 1536,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=["dense", "moe"])
    parser.add_argument("folder")
    parser.add_argument("--small", action="store_true")
    a = parser.parse_args()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config(a.kind, a.small), dtype=torch.bfloat16)
    model.save_pretrained(a.folder)
    vocabulary = {f"t{i}": i for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2"
    ).save_pretrained(a.folder)


if __name__ == "__main__":
    main()
