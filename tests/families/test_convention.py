"""What a model's layers return: conventions of models that can't be run here.

Stand-ins, a few lines of torch each: the models meant (named in each case) have config classes
that transformers 4.57 lacks, or no kernel on a CPU. The families of ``registry.py`` are the
real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_compat import UnsupportedModelError
from vllm_compat.worker.convention import establish_convention
from vllm_compat.worker.decoder import find_decoder

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

    ranks_before = ranks_after = 1

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
                hidden, residual = self.norm(hidden * self.ranks_before, residual)
            hidden = self.inner(hidden) * self.ranks_after
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
        decoder = find_decoder(model, CONFIG, lambda: model(ids))
        return establish_convention(decoder, lambda number: model(ids + number), TOKENS)[0]


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


class Hybrid(Model):
    """Layers of two kinds; ``styles`` says of which kind each of them is."""

    def __init__(self, *styles: str) -> None:
        super().__init__("pair", "pair")
        self.layers = nn.ModuleList(Layer(style) for style in styles)


class Scaled(Model):
    """The final norm is given something else than what the layers return."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden * 2)


class Backwards(Model):
    """The layers run in another order than that of the list."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden = self.embed(ids)
        for layer in reversed(self.layers):
            hidden = layer(hidden)
        return self.norm(hidden)


class Deferred(Model):
    """DeepSeek-V3.2 and MiniMax-M3 on NVIDIA GPUs, vLLM 0.32, with tensor parallelism.

    A layer's MLP returns this rank's part of the sum; the next layer sums it over all ranks
    before it adds it. Here: two ranks with the same part. The last layer does it itself.
    """

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual = self.embed(ids), None
        for index, layer in enumerate(self.layers):
            # Inside of the layer, as in the real ones.
            layer.ranks_before = 2 if index > 0 else 1
            layer.ranks_after = 2 if index == LAYERS - 1 else 1
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0]


class Sharded(Model):
    """Sequence parallelism over two ranks: this one has every second row."""

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual = self.embed(ids)[::2], None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0].repeat_interleave(2, 0)


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
        pytest.param(
            lambda: Hybrid("pair", "stale", "pair"), "layer 1 .* disagree", id="hybrid"
        ),
        pytest.param(
            lambda: Deferred("pair", "pair"), "layer 1 .*neither", id="deepseek-v3.2-deferred"
        ),
        pytest.param(lambda: Sharded("pair", "pair"), "for 8 tokens", id="sequence-parallel"),
        pytest.param(lambda: Scaled("one", "one"), "neither", id="scaled-before-the-norm"),
        pytest.param(lambda: Backwards("one", "one"), "in order", id="backwards"),
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


class Encoder(nn.Module):
    """ChatGLM: the decoder is called ``encoder``, and GLM-4V has a vision tower beside it."""

    def __init__(self) -> None:
        super().__init__()
        inner = Model("one", "one")
        self.transformer = nn.Module()
        self.transformer.encoder = inner
        self.transformer.vision = Model("one", "one")

    def forward(self, ids: torch.Tensor) -> Any:
        return self.transformer.encoder(ids)


class Experts(Model):
    """As many experts in each layer as there are layers, and a list beside them."""

    def __init__(self) -> None:
        super().__init__("one", "one")
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        for layer in self.layers:
            layer.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))


def test_norm_beside_the_decoder() -> None:
    assert establish(Nested()) == "hidden+residual"


def test_wrapper_that_does_not_know_its_language_model() -> None:
    assert establish(Wrapper(Model("pair", "pair"))) == "hidden+residual"


def test_names_of_towers_mean_nothing() -> None:
    assert establish(Encoder()) == "hidden"
    assert find_decoder(Experts(), CONFIG).path == "layers"


def test_lists_that_both_run_are_refused() -> None:
    class Both(Wrapper):
        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(ids) + self.visual(ids)

    with pytest.raises(UnsupportedModelError, match="several"):
        establish(Both(Model("pair", "pair")))


@pytest.mark.parametrize("model", [Encoder, lambda: Wrapper(Scaled("one", "one"))])
def test_nothing_stays_on_the_model(model: Callable[[], nn.Module]) -> None:
    """Neither a hook nor a replaced forward; not even where the model is refused."""
    made, caching, ids = model(), nn.Identity(), torch.arange(TOKENS)
    with contextlib.suppress(UnsupportedModelError), torch.inference_mode():
        decoder = find_decoder(made, CONFIG, lambda: made(ids))
        establish_convention(decoder, lambda number: made(ids + number), TOKENS, [caching])
    assert "forward" not in vars(caching)
    for module in made.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Recurrent(nn.Module):
    """A state-space layer without metadata: it leaves its output as it was allocated."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        output.fill_(float("nan"))
        return output if self.returns else None


@pytest.mark.parametrize("returns", [True, False])
def test_layers_with_a_cache_are_silent(returns: bool) -> None:
    class Mixed(Model):
        def __init__(self) -> None:
            super().__init__("pair", "pair")
            self.mixer = Recurrent(returns)

        def forward(self, ids: torch.Tensor) -> Any:
            hidden = self.embed(ids)
            output = torch.empty_like(hidden)
            # By name, as vLLM's Transformers backend does.
            result = self.mixer.forward(hidden, output=output)
            hidden, residual = hidden + (output if result is None else result), None
            for layer in self.layers:
                hidden, residual = layer(hidden, residual)
            return self.norm(hidden, residual)[0]

    model, ids = Mixed(), torch.arange(TOKENS) + 3
    with torch.inference_mode():
        decoder = find_decoder(model, CONFIG)

        def forward(number: int) -> Any:
            return model(ids + number)

        with pytest.raises(UnsupportedModelError, match="not finite"):
            establish_convention(decoder, forward, TOKENS)
        assert establish_convention(decoder, forward, TOKENS, [model.mixer])[0]
