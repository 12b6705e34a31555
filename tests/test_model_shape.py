"""The shape of a model from its config, in the words of many families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat import model_shape
from vllm_compat.errors import UnsupportedModelError

USUAL = {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 500}
VISION = {"num_hidden_layers": 24, "hidden_size": 1024, "num_layers": 24}

# In the words of config.json, of the families' own (from published checkpoints).
WORDS: dict[str, dict[str, Any]] = {
    "llama": {**USUAL, "max_position_embeddings": 4096},
    "chatglm": {
        "model_type": "chatglm", "num_layers": 8, "hidden_size": 64,
        "padded_vocab_size": 500, "seq_length": 4096,
    },
    "mpt": {
        "model_type": "mpt", "n_layers": 8, "d_model": 64, "vocab_size": 500,
        "max_seq_len": 4096,
    },
    "dbrx": {
        "model_type": "dbrx", "n_layers": 8, "d_model": 64, "vocab_size": 500,
        "max_seq_len": 4096,
    },
    "gpt2": {
        "model_type": "gpt2", "n_layer": 8, "n_embd": 64, "vocab_size": 500,
        "n_positions": 4096,
    },
    "gptj": {
        "model_type": "gptj", "n_layer": 8, "n_embd": 64, "vocab_size": 500,
        "n_positions": 4096,
    },
    "bloom": {
        "model_type": "bloom", "n_layer": 8, "hidden_size": 64, "vocab_size": 500,
        "seq_length": 4096,
    },
    "bloom, as published first": {
        "model_type": "bloom", "n_layer": 8, "n_embed": 64, "vocab_size": 500,
        "seq_length": 4096,
    },
    "falcon, as published first": {
        "n_layer": 8, "hidden_size": 64, "vocab_size": 500, "max_position_embeddings": 4096,
    },
    "internvl": {
        "model_type": "internvl_chat", "vision_config": VISION, "hidden_size": 3200,
        "llm_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "deepseek_vl_v2": {
        "vision_config": VISION,
        "language_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "kimi_k25": {
        "vision_config": VISION, "text_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "qwen2_5_vl, flat": {
        **USUAL, "max_position_embeddings": 4096, "vision_config": VISION,
    },
    "qwen2_5_omni": {
        "thinker_config": {
            "audio_config": VISION, "vision_config": VISION,
            "text_config": {**USUAL, "max_position_embeddings": 4096},
        },
        "talker_config": {"num_hidden_layers": 3, "hidden_size": 32},
    },
    "gemma3": {
        "vision_config": VISION, "text_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "llama4": {
        "vision_config": VISION, "vocab_size": 7,
        "text_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "paligemma, hidden_size of the projector outside": {
        "hidden_size": 2048, "num_hidden_layers": None, "vision_config": VISION,
        "text_config": {**USUAL, "max_position_embeddings": 4096},
    },
    "text_config that says nothing": {
        **USUAL, "max_position_embeddings": 4096, "text_config": {},
    },
    "the least of several lengths": {
        **USUAL, "max_position_embeddings": 8192, "seq_length": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", WORDS)
def test_families_in_their_own_words(family: str) -> None:
    expected = model_shape.ModelShape(8, 64, 500, 4096)
    assert model_shape.find_shape(WORDS[family]) == expected
    assert model_shape.find_shape(_as_objects(WORDS[family])) == expected


def _as_objects(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{key: _as_objects(item) for key, item in value.items()})
    return value


@pytest.mark.parametrize(
    "model_type",
    ["bloom", "dbrx", "falcon", "gemma3", "gpt2", "gptj", "internvl", "llama", "llama4", "mpt",
     "phi3", "qwen2_5_omni", "qwen2_5_vl", "qwen3_vl_moe"],
)  # fmt: skip
def test_as_vllm_reads_them(model_type: str) -> None:
    """Every layer, width and vocabulary is what vLLM's text config says."""
    from transformers import AutoConfig
    from vllm.transformers_utils.config import get_hf_text_config

    config = AutoConfig.for_model(model_type)
    text = get_hf_text_config(config)
    found = model_shape.shape_of(config, model_type)
    assert found.layers == text.num_hidden_layers
    assert found.hidden_size == text.hidden_size
    assert found.vocabulary == text.vocab_size


@pytest.mark.parametrize("config", [{}, {"hidden_size": 3}, {"num_layers": True}, None])
def test_configs_that_do_not_say(config: Any) -> None:
    assert model_shape.find_shape(config) is None
    with pytest.raises(
        UnsupportedModelError, match=r"^model x: its config doesn't say how many"
    ):
        model_shape.shape_of(config, "model x")


def test_a_config_class_of_vllm_s_own(tmp_path: Path) -> None:
    config = {**WORDS["chatglm"], "num_attention_heads": 4, "architectures": ["ChatGLMModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape.read_shape(str(tmp_path)) == model_shape.ModelShape(8, 64, 500, 4096)


def test_a_model_type_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody-s"}')
    with pytest.raises(UnsupportedModelError, match="can't read the config of"):
        model_shape.read_shape(str(tmp_path))


def test_the_generator_s_own_choice() -> None:
    assert model_shape.default_layers(32) == (2, 16, 29, 31)


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys, vllm_compat.model_shape as m; assert m.find_shape({'n_layer': 2, "
        "'n_embd': 4}); print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
