"""Families on a GPU, in sizes that its kernels take. By hand; there is no GPU in the tests.

    cd tests; python -m families.on_gpu FOLDER qwen3_moe kimi_k2_5_int4 ...

Prints, for each family, the class that vLLM ran it with and the largest error of a row after
each layer, against transformers in float32. In bfloat16, and with all experts taken (Llama 4:
one): where a router has to choose, two experts with nearly the same score are swapped by the
noise of the dtype, and a swapped expert is another state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from . import registry
from .registry import FAMILIES, Family

DTYPE = "bfloat16"
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.04,
}
#: Of the real models: the MLA kernels are made for these.
MLA = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
EXPERTS = 4
WIDE = 256


def on_gpu(family: Family) -> Family:
    """The family in sizes for a GPU."""
    config = dict(family.config)
    if "kv_lora_rank" in config:
        config |= MLA
        config["q_lora_rank"] = config["q_lora_rank"] and WIDE
    one = config.get("num_experts_per_tok") == 1  # Llama 4's routing is for no more
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok"):
        if name in config and not (one and name == "num_experts_per_tok"):
            config[name] = EXPERTS
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if name in config:
            config[name] = WIDE
    if "n_group" in config:
        config |= {"n_group": 1, "topk_group": 1}
    if "mamba_n_heads" in config:
        config |= {"mamba_n_heads": 16, "mamba_d_head": 64}  # twice the hidden size
    return replace(family, config=config)


def make(names: list[str], folder: Path) -> None:
    """Checkpoints and references; by transformers, on the CPU."""
    registry.SIZES = {**registry.SIZES, **SIZES}  # before it is imported from there
    from . import checkpoints

    for family in FAMILIES:
        if family.name in names:
            made = checkpoints.make(on_gpu(family), DTYPE, folder)
            (folder / family.name).unlink(missing_ok=True)
            (folder / family.name).symlink_to(made.name)


def main(arguments: list[str]) -> int:
    folder, *names = arguments
    make(names, Path(folder))
    failed = 0
    for name in names:
        result = Path(folder) / f"{name}.json"
        command = [sys.executable, "-m", "families.case", str(Path(folder) / name), str(result)]
        done = subprocess.run(
            command, check=False, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        )
        if done.returncode:
            failed += 1
            print(f"{name}: failed")
            continue
        found = json.loads(result.read_text("utf-8"))
        errors = [max(of_layer) for of_layer in zip(*found["errors"], strict=True)]
        shown = ", ".join(f"{100 * error:.1f} %" for error in errors)
        print(f"{name}: {found['vllm_class']}, worst row by layer {shown}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
