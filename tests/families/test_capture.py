"""What the worker takes, from which rows, on which ranks: the hooks themselves.

The decoder is a stand-in of a few lines. What is shown here doesn't occur on a CPU (rows of
padding, pipeline stages: vLLM's GPU runners have them), or only shows where it is left out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_compat.transport.messages import Kind, Segment
from vllm_compat.worker.capture import Capture
from vllm_compat.worker.convention import Convention
from vllm_compat.worker.decoder import find_decoder
from vllm_compat.worker.extension import CaptureExtension

from .test_convention import CONFIG, LAYERS, TOKENS, Model

SCHEDULED = TOKENS - 3


class Noted:
    """An outbox that keeps what it is given, as it is."""

    def __init__(self) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        self.others: dict[int, torch.Tensor] = {}

    def begin(self, step: int, segments: list[Segment]) -> None: ...

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        if kind == Kind.ROWS:
            self.rows[layer] = tensor
        else:
            self.others[kind] = tensor


class Overwritten(Model):
    """What a layer has returned is written over as soon as the next one is through.

    vLLM's kernels do so: a fused norm writes its result into the tensors that it is given.
    """

    def __init__(self, style: str, final: str) -> None:
        super().__init__(style, final)
        self.style = style

    def forward(self, input_ids: torch.Tensor) -> Any:
        self.seen: list[torch.Tensor] = []
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            given = (hidden, residual)
            # Clones: what comes next must still be right.
            out = layer(*(None if t is None else t.clone() for t in given))
            hidden, residual = out[:2] if isinstance(out, tuple) else (out, None)
            self.seen.append(hidden + residual if self.style == "pair" else hidden.clone())
            for tensor in given:
                if tensor is not None:
                    tensor.fill_(float("nan"))
        return self.norm(hidden, residual)[0] if self.final == "pair" else self.norm(hidden)


def capture(model: nn.Module, convention: Convention, *, sends: bool = True) -> Capture:
    taken = Capture(
        find_decoder(model, CONFIG),
        convention,
        list(range(LAYERS)),
        lambda: [Segment("a", 0, 2), Segment("b", 0, SCHEDULED - 2)],
        sends,
        model,
    )
    taken.outbox = Noted()  # type: ignore[assignment]
    return taken


def step(taken: Capture, model: nn.Module) -> Noted:
    with torch.inference_mode():
        taken.begin(0)
        model(torch.arange(TOKENS) + 3)
        taken.end()
    assert isinstance(taken.outbox, Noted)
    return taken.outbox


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("style", "final", "convention"),
    [("pair", "pair", "hidden+residual"), ("one", "one", "hidden"), ("stale", "one", "hidden")],
)
def test_rows_are_copies_and_those_that_were_scheduled(
    style: str, final: str, convention: Convention
) -> None:
    """Kernels that come later write over what a layer returned; the rest is padding."""
    model = Overwritten(style, final)
    noted = step(capture(model, convention), model)
    assert sorted(noted.rows) == list(range(LAYERS))
    for layer, rows in noted.rows.items():
        assert torch.equal(rows, model.seen[layer][:SCHEDULED])
    assert len(noted.others[Kind.TOKENS]) == SCHEDULED
    assert len(noted.others[Kind.NORMS]) == SCHEDULED


def test_a_rank_that_does_not_send_hooks_nothing() -> None:
    model = Overwritten("pair", "pair")
    taken = capture(model, "hidden+residual", sends=False)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not step(taken, model).rows


def test_fewer_rows_than_scheduled_are_an_error() -> None:
    """As under sequence parallelism, where a rank has some of the rows."""
    model = Overwritten("one", "one")
    capture(model, "hidden").begin(0)
    with pytest.raises(RuntimeError, match=f"returned 2 rows; {SCHEDULED} were scheduled"):
        model(torch.arange(2))


def test_pipeline_stages_are_refused() -> None:
    worker = CaptureExtension()
    worker.model_runner = SimpleNamespace(model=Model("pair", "pair"))
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=CONFIG),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
    )
    assert "pipeline stages" in worker.vllm_compat_setup([0])["refused"]
