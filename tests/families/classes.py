"""vLLM's own model classes without an engine: what is found out about each.

For models whose config and weights transformers has no class for, so that there is nothing to
compare rows with. vLLM builds the class from a config of tiny sizes, its weights are random,
and the trial of the worker's set-up runs on it: vLLM's forward, its layers, its norms. What
must come out was read in vLLM's source, and is not what the set-up measures.

``python -m families.classes OUTPUT NAME...`` writes a JSON object: for each name of ``CLASSES``
what was found, ``refused`` and why, or ``error``. A process of its own: vLLM keeps its
distributed state in the process.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Class:
    """One class of vLLM.

    Attributes:
        architecture: its name in vLLM's registry.
        layers: where its decoder layers are.
        convention: what they return, by reading; empty if the model has to be refused.
        refused: words of the sentence that refuses it.
        config: differences from ``COMMON``.
        title: what sets it apart from another entry of the same class.
        broken: the final norm is made to see another stream than the layers return, as in a
            model that scales it: the self-check of the set-up has to notice.
    """

    architecture: str
    layers: str = ""
    convention: str = ""
    refused: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    broken: bool = False


LAYERS = 4
COMMON: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-6,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
MOLMO = {
    "embedding_size": 512,
    "layer_norm_type": "rms",
    "qkv_bias": False,
    "attention_layer_norm": False,
    "weight_tying": False,
    "norm_after": False,
}
CHATGLM = {
    "model_type": "chatglm",
    "num_layers": LAYERS,
    "num_hidden_layers": None,
    "padded_vocab_size": 512,
    "ffn_hidden_size": 256,
    "kv_channels": 32,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "seq_length": 1024,
    "layernorm_epsilon": 1e-5,
    "original_rope": True,
}
ADDED = "hidden+residual"

CLASSES: Mapping[str, Class] = {
    "molmo": Class("MolmoForCausalLM", "get_language_model().layers", ADDED, config=MOLMO),
    # The residual that its layers return is None.
    "molmo-norm-after": Class(
        "MolmoForCausalLM",
        "get_language_model().layers",
        "hidden",
        config=MOLMO | {"norm_after": True},
        title="norm_after",
    ),
    "chatglm": Class("ChatGLMModel", "transformer.encoder.layers", "hidden", config=CHATGLM),
    # Nothing is called after its last layer.
    "chatglm-without-norm": Class(
        "ChatGLMModel",
        "transformer.encoder.layers",
        "hidden",
        config=CHATGLM | {"post_layer_norm": False},
        title="without a final norm",
    ),
    # The layers are in a module of their own, beside the norm.
    "plamo3": Class(
        "Plamo3ForCausalLM",
        "model.layers.layers",
        ADDED,
        config={
            "layer_types": ["full_attention"] * LAYERS,
            "interleaved_sliding_window": [None] * LAYERS,
            "rope_local_theta": 10000,
        },
    ),
    "exaone": Class(
        "ExaoneForCausalLM", "transformer.h", ADDED, config={"activation_function": "silu"}
    ),
    "qwen": Class("QWenLMHeadModel", "transformer.h", ADDED, config={"kv_channels": 32}),
    "baichuan": Class("BaichuanForCausalLM", "model.layers", ADDED),
    "internlm2": Class("InternLM2ForCausalLM", "model.layers", ADDED, config={"bias": False}),
    "minicpm": Class(
        "MiniCPMForCausalLM",
        "model.layers",
        "hidden",
        config={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64},
    ),
    "orion": Class("OrionForCausalLM", "model.layers", "hidden"),
    "orion-broken": Class(
        "OrionForCausalLM", refused="neither what its last", title="broken", broken=True
    ),
    "qwen-broken": Class(
        "QWenLMHeadModel",
        refused="neither what its last",
        config={"kv_channels": 32},
        title="broken",
        broken=True,
    ),
    # Each layer runs several times in one forward: there is no one state after it.
    "ouro": Class("OuroForCausalLM", refused="once each", config={"total_ut_steps": 2}),
    "iquest-loopcoder": Class(
        "IQuestLoopCoderForCausalLM",
        refused="once each",
        config={"loop_num": 2, "loop_window_size": 64},
    ),
}


def write(which: Class, folder: Path) -> None:
    content = {"model_type": "of_a_test", **COMMON, **which.config}
    content |= {
        "architectures": [which.architecture],
        "auto_map": {"AutoConfig": "configuration_of_a_test.ConfigOfATest"},
    }
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    (folder / "configuration_of_a_test.py").write_text(
        "from transformers import PretrainedConfig\n\n\n"
        "class ConfigOfATest(PretrainedConfig):\n"
        f"    model_type = {content['model_type']!r}\n"
    )


def build(folder: Path) -> tuple[Any, Any]:
    """vLLM's configuration and its model, with random weights."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import (
        initialize_model,
        process_weights_after_loading,
    )

    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        trust_remote_code=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            method = f"file://{folder / 'rendezvous'}"
            init_distributed_environment(1, 0, method, 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(config)
        finally:
            torch.set_default_dtype(torch.float32)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name or "ln_" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.data.copy_(noise + mean)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return config, model.eval()


def find_out(which: Class) -> dict[str, Any]:
    import torch

    from vllm_compat import UnsupportedModelError
    from vllm_compat.worker.convention import establish_convention
    from vllm_compat.worker.decoder import find_decoder
    from vllm_compat.worker.trial import TOKENS, Trial, remember

    with tempfile.TemporaryDirectory() as name:
        write(which, Path(name))
        config, model = build(Path(name))
    if which.broken:
        norm = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
        norm.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    known = config.compilation_config.static_forward_context.values()
    caching = [layer for layer in known if hasattr(layer, "kv_cache")]
    try:
        with torch.inference_mode():
            trial = Trial(model, config, torch.device("cpu"))
            decoder = find_decoder(model, config.model_config.hf_text_config, trial)
            convention, _ = establish_convention(decoder, trial, TOKENS, caching, remember)
    except UnsupportedModelError as error:
        return {"refused": str(error)}
    return {"layers": decoder.path, "convention": convention}


def main(arguments: list[str]) -> None:
    output, names = Path(arguments[0]), arguments[1:] or list(CLASSES)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = find_out(CLASSES[name])
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
