"""Models on which the set-up's trial forward has gone wrong: accepted, and every row is right.

Real engines. What the trial may run into in the weights; the conventions are in
``test_convention.py`` and ``test_asking.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_compat.worker.trial import choose_tokens

from .registry import FAMILIES, SIZES, Family
from .test_families import check, generate

LLAMA = next(family for family in FAMILIES if family.name == "llama")
QWEN3_MOE = next(family for family in FAMILIES if family.name == "qwen3_moe")
DEEPSEEK = next(family for family in FAMILIES if family.name == "deepseek_v3")


def amplifying(model: Any) -> None:
    """A massive activation: layer 1 adds some hundred times what it is given."""
    layer = model.model.layers[1]
    layer.mlp.down_proj.weight.data *= 300
    layer.self_attn.o_proj.weight.data *= 300


def one_channel(model: Any) -> None:
    """As large models have it: one channel, in all layers.

    Compared in float32: where the channel happens to be small, what is amplified is rounding.
    """
    model.model.layers[0].mlp.down_proj.weight.data[7] *= 3000


def reserved(model: Any) -> None:
    """Reserved ids: a row of zeros each. Those that the trial took once, and half of all."""
    model.model.embed_tokens.weight.data[3 : 3 + 8 * 7 : 7] = 0
    model.model.embed_tokens.weight.data[SIZES["vocab_size"] // 2 :] = 0


def idle(model: Any) -> None:
    """A layer that adds nothing, as those that are inserted to grow a model."""
    layer = model.model.layers[2]
    layer.mlp.down_proj.weight.data.zero_()
    layer.self_attn.o_proj.weight.data.zero_()


@dataclass(frozen=True)
class Case:
    change: Callable[[Any], None] = lambda model: None
    dtype: str = "bfloat16"
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "amplifying": Case(amplifying),
    "amplifying-float16": Case(amplifying, "float16"),
    "one-channel": Case(one_channel, "float32"),
    "reserved-ids": Case(reserved, "float32"),
    "idle": Case(idle),
    "vocabulary-of-40": Case(dtype="float32", config={"vocab_size": 40}),
    "vocabulary-of-5": Case(dtype="float32", config={"vocab_size": 5}),
}


@pytest.mark.engine
@pytest.mark.parametrize("name", CASES)
def test_rows_are_right(name: str, workaround_path: Path, tmp_path: Path) -> None:
    case = CASES[name]
    folder = tmp_path / "checkpoint"
    write(case, folder)
    result = generate(LLAMA, case.dtype, 1, folder, workaround_path, tmp_path)
    assert "refused" not in result, result["refused"]
    assert result["convention"] == "hidden+residual"
    worst = max(error for layers in result["errors"] for error in layers)
    assert worst <= LLAMA.allowed(case.dtype)


def write(case: Case, folder: Path) -> None:
    """The checkpoint, and transformers' states of the same weights."""
    from . import checkpoints

    family = replace(LLAMA, config={**LLAMA.config, **case.config})
    dtype = checkpoints.SAVED_AS[case.dtype]
    (folder / "model").mkdir(parents=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = checkpoints.config_of(family)
        vocabulary = config.vocab_size
        config.bos_token_id = config.eos_token_id = config.pad_token_id = None
        model = checkpoints.model_of(family, dtype, config)
    case.change(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    # Ids below the vocabulary, and with an embedding: a row of zeros has no direction.
    sizes = model.model.embed_tokens.weight.norm(dim=-1)
    usable = sizes.nonzero()[:, 0].tolist()
    prompts = [
        [usable[token % len(usable)] for token in prompt] for prompt in checkpoints.prompts()
    ]
    assert max(map(max, prompts)) < vocabulary
    states = checkpoints.reference(model, prompts)
    model.to(dtype).save_pretrained(folder / "model")
    checkpoints.write_tokenizer(folder / "model")
    torch.save({"prompts": prompts, "states": states}, folder / "reference.pt")


@pytest.mark.engine
@pytest.mark.parametrize("family", [QWEN3_MOE, DEEPSEEK], ids=lambda family: family.name)
def test_experts_as_operators(
    family: Family, checkpoint_cache: Path, workaround_path: Path, tmp_path: Path
) -> None:
    """The path of a GPU: the operator takes its layer's name from a counter.

    The set-up runs each layer more than once. A layer would get the experts of a later one,
    and the last ones an AssertionError.
    """
    if not hasattr_counter():
        pytest.skip("this vLLM has no such counter")
    family = replace(family, workarounds=(*family.workarounds, "experts_as_operators"))
    check(family, "float32", 1, checkpoint_cache, workaround_path, tmp_path)


def hasattr_counter() -> bool:
    from vllm.forward_context import ForwardContext

    return hasattr(ForwardContext, "moe_layer_index")


# --- which tokens --------------------------------------------------------------------------


def embedding(rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return nn.Embedding.from_pretrained(rows)


def chosen(embed: Any, vocabulary: int, count: int = 16) -> list[int]:
    ids: list[int] = choose_tokens(embed, vocabulary, count, torch.device("cpu")).tolist()
    assert len(ids) == count
    assert all(0 <= token < vocabulary for token in ids)
    return ids


def rows(vocabulary: int, *, zero: Sequence[int] = ()) -> torch.Tensor:
    values = torch.randn(vocabulary, 8, generator=torch.Generator().manual_seed(0))
    values[list(zero)] = 0
    return values


def test_no_token_without_an_embedding() -> None:
    values = rows(1000, zero=range(990))
    assert set(chosen(embedding(values), 1000)) == set(range(990, 1000))


def test_tokens_of_the_usual_size() -> None:
    values = rows(1000)
    values[::2] *= 1000
    values[::3] /= 1e6
    sizes = values.norm(dim=-1)[chosen(embedding(values), 1000)]
    assert sizes.max() < 100 * sizes.min()


def test_untrained_ids_that_share_one_embedding() -> None:
    values = rows(1000)
    values[20:] = values[20]
    ids = chosen(embedding(values), 1000)
    assert len({tuple(values[token].tolist()) for token in ids}) > 5


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 15, 40, 255, 257, 5000])
def test_any_vocabulary(vocabulary: int) -> None:
    ids = chosen(embedding(rows(vocabulary)), vocabulary)
    assert len(set(ids)) == min(vocabulary, 16)
    assert len(set(chosen(None, vocabulary))) == min(vocabulary, 16)


def test_nothing_but_zeros_is_left_to_the_trial() -> None:
    assert len(set(chosen(embedding(torch.zeros(300, 8)), 300))) == 16


def test_a_function_that_wants_more_than_ids() -> None:
    def embed(ids: torch.Tensor, images: Any) -> torch.Tensor:
        raise AssertionError

    assert len(set(chosen(embed, 300))) == 16


# --- the context of a layer that runs again -------------------------------------------------


def test_a_layer_runs_again_where_it_began() -> None:
    """vLLM 0.15.0 pops names from a list in the context, later ones count in it."""
    from vllm.forward_context import get_forward_context, override_forward_context

    from vllm_compat.worker.trial import remember

    context = SimpleNamespace(moe_layer_index=3, remaining_moe_layers=["c", "b", "a"])

    def layer() -> str:
        get_forward_context().moe_layer_index += 1
        return str(get_forward_context().remaining_moe_layers.pop())

    with override_forward_context(context):
        again = remember()
        assert layer() == "a"
        for _ in range(2):
            with again():
                assert get_forward_context().moe_layer_index == 3
                assert layer() == "a"
        assert get_forward_context() is context
        assert context.moe_layer_index == 4
        assert layer() == "b"
