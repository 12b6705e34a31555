"""Tiny random checkpoints, and what transformers computes for them.

The weights are rounded to bf16 first, so that transformers in float32 and vLLM in bf16 start
from the same numbers and differ by the noise of bf16 arithmetic alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 512
WORDS = VOCABULARY - 3

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": VOCABULARY - 2,
    "eos_token_id": VOCABULARY - 1,
    "initializer_range": 0.03,
}


@dataclass(frozen=True)
class Family:
    """A model family, and how the suite asks for its states."""

    name: str
    config: Any
    model: Any
    layers: int
    layer_ids: tuple[int, ...]
    """Not sorted, one twice, the last among them: what the generator's own code loses."""
    max_num_batched_tokens: int | None
    """Passed where the generator takes it (0.4.x): less than a prompt, which so is cut up."""


FAMILIES = (
    Family("llama", LlamaConfig, LlamaForCausalLM, 8, (5, 2, 7, 2), None),
    Family("qwen3", Qwen3Config, Qwen3ForCausalLM, 4, (3, 0), 160),
)


def prompt(length: int, seed: int) -> list[int]:
    """That many token ids, the same for the same seed."""
    source = random.Random(seed * 100_003 + length)
    return [source.randrange(WORDS) for _ in range(length)]


def write_checkpoint(family: Family, folder: Path) -> Any:
    """Writes model and tokenizer; returns the same model in float32."""
    torch.manual_seed(11)
    model = family.model(family.config(num_hidden_layers=family.layers, **_SHAPE)).eval()
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones otherwise: a norm that is left out would hardly show
                weight.add_(torch.randn(weight.shape, generator=noise) * 0.1)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(WORDS)} | {
        "<unk>": WORDS,
        "<s>": WORDS + 1,
        "</s>": WORDS + 2,
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return model.float()


CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|> {% endfor %}"
)


def write_chat_checkpoint(folder: Path) -> Path:
    """The first family, with a chat template; its words are t0, t1, ..."""
    write_checkpoint(FAMILIES[0], folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


class Reference:
    """The residual stream after each asked layer, one prompt at a time, in float32."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        self._model = model
        self._layer_ids = tuple(layer_ids)
        self._seen: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def __call__(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """One tensor [len(ids), hidden] for each layer id, in their order."""
        key = tuple(ids)
        if key not in self._seen:
            self._seen[key] = self._run(key)
        return self._seen[key]

    def _run(self, ids: tuple[int, ...]) -> list[torch.Tensor]:
        caught: dict[int, torch.Tensor] = {}

        def keep(index: int) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                caught[index] = (
                    (output[0] if isinstance(output, tuple) else output)
                    .reshape(len(ids), -1)
                    .clone()
                )

            return hook

        # Not `output_hidden_states`: its last entry has gone through the final norm.
        layers = self._model.model.layers
        handles = [layers[i].register_forward_hook(keep(i)) for i in set(self._layer_ids)]
        try:
            with torch.no_grad():
                self._model.model(input_ids=torch.tensor([ids]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return [caught[i] for i in self._layer_ids]


# bf16 noise of these models is 0.3 to 3 % of a row's length (most: Llama's last layer on vLLM
# 0.12). The row next to the right one is off by 20 % at least, by 100 % mostly.
ROW_TOLERANCE = 0.06
LAYER_TOLERANCE = 0.04


def check_states(
    states: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    layer_ids: Sequence[int],
    where: str,
) -> None:
    """Every row of every layer is the one that transformers computes for that token.

    Args:
        states: bfloat16, on the CPU, contiguous, [tokens, hidden] for each layer.
        expected: float32, of the same shape.
    """
    assert len(states) == len(layer_ids), where
    for layer, state, right in zip(layer_ids, states, expected, strict=True):
        here = f"{where}, layer {layer}"
        assert state.shape == right.shape, here
        assert state.dtype == torch.bfloat16, here
        assert state.device.type == "cpu", here
        assert state.is_contiguous(), here
        off = (state.float() - right).norm(dim=-1) / right.norm(dim=-1)
        worst = int(off.argmax())
        assert off[worst] < ROW_TOLERANCE, f"{here}: row {worst} is off by {off[worst]:.1%}"
        error = (state.float() - right).norm() / right.norm()
        assert error < LAYER_TOLERANCE, f"{here}: off by {error:.1%}"
