"""What is said of a rotary embedding, for each kind that vLLM has: on vLLM's own modules."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm.model_executor.layers.rotary_embedding as ropes
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.transformers_utils.config import get_config

from vllm_compat.errors import UnsupportedModelError
from vllm_compat.worker.rope import check_rope

HEAD, ORIGINAL = 32, 128
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
    "long_factor": [2.0 + 0.7 * i for i in range(HEAD // 2)],
}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}

Check = Callable[..., dict[str, Any] | None]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Checks the embedding that vLLM makes for a rope_scaling; as its Llama asks for it."""

    def run(
        scaling: dict[str, Any] | None, positions: int, max_model_len: int, **more: Any
    ) -> dict[str, Any] | None:
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4 * HEAD,
            "num_attention_heads": 4,
            "head_dim": HEAD,
            "max_position_embeddings": positions,
            "rope_theta": 10000.0,
            **more,
        }
        if scaling is not None:
            config["rope_scaling"] = scaling
        (tmp_path / "config.json").write_text(json.dumps(config))
        text = get_config(str(tmp_path), trust_remote_code=False)
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
        module = ropes.phi3_long_rope_scaled_rope
        # Before 0.12 it has no such name; from then on it asks for nothing but that number.
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: engine, raising=False)
        ropes._ROPE_DICT.clear()  # its keys don't have max_model_len
        with set_current_vllm_config(VllmConfig()):
            rope = _make(text, positions)
        return check_rope(nn.ModuleList([rope]), text, max_model_len)

    with mock.patch.dict(os.environ):  # vLLM's config for a CPU sets some
        yield run


def _make(text: Any, positions: int) -> nn.Module:
    parameters = getattr(text, "rope_parameters", None)
    if parameters is None:  # 0.11
        return ropes.get_rope(
            HEAD, HEAD, positions, 10000.0, True, text.rope_scaling, torch.float32
        )
    return ropes.get_rope(
        HEAD, max_position=positions, rope_parameters=parameters, dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        (LLAMA3, 1024),
        (YARN, 512),
        (YARN, 128),
        ({**YARN, "beta_fast": 16, "beta_slow": 2}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "alpha": 100.0}, 512),
    ],
)
def test_kinds_that_are_transformers_own(
    check: Check, scaling: dict[str, Any] | None, positions: int
) -> None:
    assert check(scaling, positions, 100) is None


def test_dynamic(check: Check) -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    if _extends_dynamic():
        found = check(scaling, 128, 100)
        assert found is not None
        assert found["length"] == 512
        rest = "transformers computes prompts of fewer than 512 tokens otherwise."
        assert found["note"].endswith(f"max_model_len=100; {rest}")
        return
    assert check(scaling, 128, 129) is None
    with pytest.raises(UnsupportedModelError, match='no longer extends "dynamic" rope_scaling'):
        check(scaling, 128, 130)


def _extends_dynamic() -> bool:
    arguments = inspect.signature(ropes.DynamicNTKScalingRotaryEmbedding).parameters
    return "max_trained_positions" not in arguments


def test_longrope(check: Check) -> None:
    original = {"original_max_position_embeddings": ORIGINAL}
    assert check(LONGROPE, 512, ORIGINAL, **original) is None
    if not _longrope_is_settled():
        with pytest.raises(UnsupportedModelError, match="states depend on the other prompts"):
            check(LONGROPE, 512, ORIGINAL + 1, **original)
        return
    found = check(LONGROPE, 512, ORIGINAL + 1, **original)
    assert found is not None
    assert (found["kind"], found["length"]) == ("longrope", 513)
    assert (
        "max_model_len=129; transformers computes prompts of up to 128 tokens" in found["note"]
    )


def _longrope_is_settled() -> bool:
    code = inspect.getsource(ropes.Phi3LongRoPEScaledRotaryEmbedding)
    return "use_long_rope" in code


@pytest.mark.parametrize("max_model_len", [100, 400])
def test_what_no_length_explains(check: Check, max_model_len: int) -> None:
    scaling = {**LONGROPE, "attention_factor": 0.5}
    original = {"original_max_position_embeddings": ORIGINAL}
    if max_model_len > ORIGINAL and not _longrope_is_settled():
        pytest.skip("refused")
    found = check(scaling, 512, max_model_len, **original)
    assert found is not None
    assert found["length"] is None
    assert "isn't transformers', for no length" in found["note"]


def test_positions_beyond_the_table(check: Check) -> None:
    assert check(None, 64, 65) is None  # the last position of a prompt is 63
    with pytest.raises(UnsupportedModelError, match="ends after 64 positions"):
        check(None, 64, 66)
