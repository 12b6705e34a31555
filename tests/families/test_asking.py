"""What the set-up finds out doesn't depend on how large, how coarse or how idle layers are.

Stand-ins of a few lines of torch that follow vLLM's conventions, drawn by hypothesis; the
engines with such weights are in ``test_trial.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from vllm_compat import UnsupportedModelError
from vllm_compat.worker.convention import establish_convention
from vllm_compat.worker.decoder import find_decoder
from vllm_compat.worker.trial import RUNS

from .test_convention import CONFIG, LAYERS, TOKENS, WIDTH

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Weights:
    """What is drawn.

    Attributes:
        seed: of the weights.
        dtype: that the model computes in.
        gains: of each layer: the size of what it adds, as a power of two. None: it adds
            nothing, as a layer whose last projection is all zeros.
        steps: the weights are whole multiples of their largest, divided by this; 0: they
            are as drawn.
        massive: one channel of the embedding, or none, is this power of two times larger.
        experts: the layers choose one of two experts for each token.
        wide: the stream itself is float32.
    """

    seed: int
    dtype: torch.dtype
    gains: tuple[int | None, ...]
    steps: int
    massive: int
    experts: bool
    wide: bool


weights = st.builds(
    Weights,
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    gains=st.tuples(*[st.one_of(st.none(), st.integers(-10, 14))] * LAYERS),
    steps=st.sampled_from([0, 1, 3, 127]),
    massive=st.integers(0, 13),
    experts=st.booleans(),
    wide=st.booleans(),
)


def norm(x: torch.Tensor) -> torch.Tensor:
    # In float32, as vLLM's kernels do.
    return nn.functional.rms_norm(x.float(), (WIDTH,)).to(x.dtype)


class Inner(nn.Module):
    """What a layer adds to the stream. Not to float16's limit: there a model is broken."""

    def __init__(self, drawn: Weights, gain: int | None) -> None:
        super().__init__()
        self.wide = drawn.wide
        self.experts = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(1 + drawn.experts)
        )
        self.router = nn.Linear(WIDTH, 2, bias=False)
        for expert in self.experts:
            weight = expert.weight.data
            if drawn.steps:
                step = weight.abs().max() / drawn.steps
                weight.copy_((weight / step).round() * step)
            weight.mul_(0.0 if gain is None else 2.0**gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.experts) == 1:
            return self.experts[0](x)
        second = self.router(x).argmax(-1, keepdim=True) == 1
        return torch.where(second, self.experts[1](x), self.experts[0](x))


class Adding(nn.Module):
    """Llama: hands out what it adds, and the stream that it is to be added to.

    ``factor``: 1. Others stand for a sum over ranks that is left to the next layer, or for a
    scale that is.
    """

    def __init__(self, inner: Inner, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        # Left to the next layer: not to the first, which is given the embedding.
        if residual is None:
            stream = hidden.float() if self.inner.wide else hidden
        else:
            stream = hidden * self.factor + residual
        return self.inner(norm(stream).to(hidden.dtype)), stream


class Leaving(nn.Module):
    """Cohere2: hands out the stream, and what it was before."""

    def __init__(self, inner: Inner, factor: float) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return hidden + self.inner(norm(hidden)), hidden


class Norm(nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return norm(hidden)
        if self.adds:
            residual = hidden + residual
        return norm(residual if self.adds else hidden), residual


class Model(nn.Module):
    def __init__(
        self, drawn: Weights, layer: Any, *, pair: bool, adds: bool, factor: float = 1.0
    ) -> None:
        super().__init__()
        torch.manual_seed(drawn.seed)
        self.embed = nn.Embedding(64, WIDTH)
        self.embed.weight.data[:, 5] *= 2.0**drawn.massive
        self.layers = nn.ModuleList(layer(Inner(drawn, gain), factor) for gain in drawn.gains)
        self.norm = Norm(adds)
        self.pair, self.adds = pair, adds
        self.to(drawn.dtype)

    def forward(self, ids: torch.Tensor) -> Any:
        hidden, residual = self.embed(ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        if self.pair:
            return self.norm(hidden, residual)[0]
        return self.norm(hidden + residual if self.adds else hidden)


def establish(model: Model) -> str:
    ids = torch.arange(RUNS * TOKENS).view(RUNS, TOKENS)
    with torch.inference_mode():
        # A model that overflows is another matter.
        assume(all(model(run).isfinite().all() for run in ids))
        decoder = find_decoder(model, CONFIG)
        return establish_convention(decoder, lambda number: model(ids[number]), TOKENS)[0]


common = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


@common
@given(weights, st.booleans())
def test_a_residual_to_add(drawn: Weights, pair: bool) -> None:
    assert establish(Model(drawn, Adding, pair=pair, adds=True)) == "hidden+residual"


@common
@given(weights, st.booleans())
def test_a_residual_that_is_left_over(drawn: Weights, pair: bool) -> None:
    assert establish(Model(drawn, Leaving, pair=pair, adds=False)) == "hidden"


@common
@given(weights)
def test_a_residual_counted_twice(drawn: Weights) -> None:
    """Chameleon-30B: the layers ignore it, the final norm adds it."""
    with pytest.raises(UnsupportedModelError, match="disagree"):
        establish(Model(drawn, Leaving, pair=True, adds=True))


@common
@given(weights, st.sampled_from([-1.0, 0.22, 0.5, 0.9, 1.1, 2.0, 4.0, 8.0]), st.booleans())
def test_a_sum_left_to_the_next_layer(drawn: Weights, factor: float, pair: bool) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*neither"):
        establish(Model(drawn, Adding, pair=pair, adds=True, factor=factor))
