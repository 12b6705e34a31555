"""What a model's layers return: conventions of models that can't be run here.

Stand-ins, a few lines of torch each: the models meant (named in each case) have config classes
that transformers 4.57 lacks, or no kernel on a CPU. The families of ``registry.py`` are the
real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_compat import UnsupportedModelError
from vllm_compat.worker.model import establish_convention, find_decoder

WIDTH, TOKENS, LAYERS = 16, 8, 3
CONFIG = SimpleNamespace(num_hidden_layers=LAYERS, hidden_size=WIDTH)


class AddNorm(nn.Module):
    """vLLM's RMSNorm: with a residual it adds it first, into the very tensor it was given."""

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.adds = adds

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return nn.functional.rms_norm(x, (WIDTH,))
        if self.adds:
            residual += x
            return nn.functional.rms_norm(residual, (WIDTH,)), residual
        return nn.functional.rms_norm(x, (WIDTH,)), residual


class Layer(nn.Module):
    """``style``: what is returned, and whether the residual that came in is used."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = AddNorm()

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if self.style in ("pair", "triple"):
            if residual is None:
                residual, hidden = hidden.clone(), self.norm(hidden)
            else:
                hidden, residual = self.norm(hidden, residual)
            hidden = self.inner(hidden)
            return (
                (hidden, residual, (hidden,)) if self.style == "triple" else (hidden, residual)
            )
        full = hidden + self.inner(self.norm(hidden))
        if self.style == "stale":
            return full, hidden
        if self.style == "none":
            return full, None
        if self.style == "zeros":
            return full, torch.zeros_like(full)
        return full


class Model(nn.Module):
    """``final``: how the last norm is called."""

    def __init__(self, style: str, final: str, *, norm_adds: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(style) for _ in range(LAYERS))
        self.norm = AddNorm(norm_adds)
        self.final = final

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual = self.embed(ids), None
        for layer in self.layers:
            out = layer(hidden, residual)
            hidden, residual = out[:2] if isinstance(out, tuple) else (out, None)
        if self.final == "pair":
            return self.norm(hidden, residual)[0]
        if self.final == "sum":
            return self.norm(hidden + residual)
        if self.final == "outside":
            return hidden
        return self.norm(hidden)


def establish(model: nn.Module) -> str:
    ids = torch.arange(TOKENS) + 3
    with torch.inference_mode():
        decoder = find_decoder(model, CONFIG)
        return establish_convention(decoder, lambda: model(ids))[0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("model", "convention"),
    [
        pytest.param(lambda: Model("pair", "pair"), "hidden+residual", id="llama"),
        pytest.param(lambda: Model("triple", "pair"), "hidden+residual", id="hunyuan_v1"),
        pytest.param(lambda: Model("pair", "sum"), "hidden+residual", id="jais2"),
        pytest.param(lambda: Model("one", "one"), "hidden", id="gpt_neox"),
        pytest.param(lambda: Model("stale", "one"), "hidden", id="exaone4"),
        pytest.param(lambda: Model("none", "one"), "hidden", id="molmo-norm-after"),
        pytest.param(lambda: Model("stale", "pair", norm_adds=False), "hidden", id="cohere2"),
        pytest.param(lambda: Model("one", "outside"), "hidden", id="step3p5"),
    ],
)
def test_established(model: Callable[[], nn.Module], convention: str) -> None:
    assert establish(model()) == convention


class Twice(Model):
    """IQuest-LoopCoder: every layer runs more than once in a forward."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        for _ in range(2):
            for layer in self.layers:
                hidden = layer(hidden)
        return self.norm(hidden)


class Stacked(Model):
    """Gemma3n: a stack of streams, mixed after the last layer."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids).repeat(4, 1, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden.mean(0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        pytest.param(lambda: Model("stale", "pair"), "disagree", id="chameleon-swin"),
        pytest.param(lambda: Twice("one", "one"), "once each", id="loopcoder"),
        pytest.param(lambda: Stacked("one", "one"), "not one residual stream", id="gemma3n"),
        pytest.param(lambda: Model("zeros", "pair"), "agree", id="nothing-added"),
    ],
)
def test_refused(model: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        establish(model())


class Nested(nn.Module):
    """PLaMo 2: ``model.layers`` is a decoder module; the norm belongs to its parent."""

    def __init__(self) -> None:
        super().__init__()
        inner = Model("pair", "pair")
        self.model = nn.Module()
        self.model.layers = nn.Module()
        self.model.layers.layers = inner.layers
        self.model.norm = inner.norm
        self.embed = inner.embed

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual = self.embed(ids), None
        for layer in self.model.layers.layers:
            hidden, residual = layer(hidden, residual)
        return self.model.norm(hidden, residual)[0]


class Wrapper(nn.Module):
    """A multimodal model; its vision tower has as many layers as the language model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.visual = Model("one", "one")
        self.inner = inner

    def get_language_model(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, ids: torch.Tensor) -> Any:
        return self.inner(ids)


def test_norm_beside_the_decoder() -> None:
    assert establish(Nested()) == "hidden+residual"


def test_wrapper_that_does_not_know_its_language_model() -> None:
    assert establish(Wrapper(Model("pair", "pair"))) == "hidden+residual"


def test_towers_that_look_alike_are_refused() -> None:
    model = Wrapper(Model("pair", "pair"))
    model.other = Model("one", "one")
    with pytest.raises(UnsupportedModelError, match="several"):
        establish(model)
