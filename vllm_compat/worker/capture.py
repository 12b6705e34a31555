"""Takes the residual stream after chosen decoder layers; the model's forward is left alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..transport.messages import Kind, Segment
from .convention import Convention
from .decoder import Decoder, hidden_of, positions_of, residual_of
from .outbox import Outbox

__all__ = ["Capture"]


class Capture:
    """Forward hooks on decoder layers.

    Rows are taken only between :meth:`begin` and :meth:`end`; forwards outside of a
    scheduler step (warm-up, profiling, dummy batches) pass untouched.

    Args:
        decoder: the model's decoder.
        convention: how its layers return the stream.
        layer_ids: layers to capture, in ascending order, each once.
        batch: says which rows the forward at hand computes; asked once a step, when the
            first layer is entered, because only then is the runner's batch final.
        sends: whether this rank sends; the others (all tensor-parallel ranks hold the same
            rows) hook nothing.
        model: what the runner calls; its ``input_ids`` are compared with the prompts.
    """

    def __init__(
        self,
        decoder: Decoder,
        convention: Convention,
        layer_ids: list[int],
        batch: Any,
        sends: bool,
        model: nn.Module,
    ) -> None:
        self.decoder = decoder
        self.convention = convention
        self.layer_ids = layer_ids
        self.outbox: Outbox | None = None
        self._batch = batch
        self._step = 0
        self._active = False
        self._entered = False
        self._count = 0
        self._input_ids: torch.Tensor | None = None
        self._handles: list[Any] = []
        if sends:
            self._signature = inspect.signature(model.forward)
            self._handles.append(model.register_forward_pre_hook(self._note, with_kwargs=True))
            first = decoder.layers[0]
            self._handles.append(first.register_forward_pre_hook(self._enter, with_kwargs=True))
            for index in layer_ids:
                layer = decoder.layers[index]
                self._handles.append(layer.register_forward_hook(self._taker(index)))

    def begin(self, step: int) -> None:
        """The next forward is the one of this scheduler step."""
        self._step, self._active, self._entered = step, True, False
        self._input_ids = None

    def end(self) -> None:
        """The step is over; whatever runs now isn't captured."""
        self._active = False
        self._input_ids = None

    @property
    def entered(self) -> bool:
        """Whether the forward of the step has reached the decoder."""
        return self._entered

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks -------------------------------------------------------------------------

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._active:
            # None where a runner has embedded the tokens itself (multimodal models).
            given = self._signature.bind_partial(*args, **kwargs).arguments.get("input_ids")
            self._input_ids = given if isinstance(given, torch.Tensor) else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active or self.outbox is None:
            return
        segments: list[Segment] = self._batch()
        self._entered = True
        self._count = sum(segment.count for segment in segments)
        self.outbox.begin(self._step, segments)
        positions = positions_of(module, args, kwargs)
        if positions is not None:
            # Models with mrope get one row of positions for each axis; on text they agree.
            flat = positions.reshape(-1, positions.shape[-1])[0][: self._count]
            self.outbox.put(Kind.POSITIONS, self._step, -1, flat.to(torch.int64, copy=True))
        if self._input_ids is not None:
            given = self._input_ids.reshape(-1)[: self._count]
            self.outbox.put(Kind.TOKENS, self._step, -1, given.to(torch.int64, copy=True))

    def _taker(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._active and self.outbox is not None:
                rows = self._rows(output)
                self.outbox.put(Kind.NORMS, self._step, index, _largest(rows))
                self.outbox.put(Kind.ROWS, self._step, index, rows)

        return hook

    def _rows(self, output: Any) -> torch.Tensor:
        """A private copy of the rows that were scheduled; padding rows are left out."""
        width = self.decoder.hidden_size
        hidden = hidden_of(output).reshape(-1, width)
        if len(hidden) < self._count:
            raise RuntimeError(
                f"a decoder layer returned {len(hidden)} rows; {self._count} were scheduled"
            )
        hidden = hidden[: self._count]
        if self.convention == "hidden":
            # The next layer's kernels may write into this very tensor.
            return hidden.clone()
        residual = residual_of(output)
        if residual is None:
            raise RuntimeError("a decoder layer returned no residual, unlike at setup")
        return hidden + residual.reshape(-1, width)[: self._count]


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each row; NaN if there is one in it. float32."""
    if rows.device.type == "cpu":
        # Seven times as fast there as the norm, which isn't vectorised (torch 2.10).
        return rows.abs().amax(dim=-1).float()
    # In one kernel, and without a second copy of the rows.
    return torch.linalg.vector_norm(rows, ord=float("inf"), dim=-1, dtype=torch.float32)
