"""One call of ``generate``: which rows are wanted, which have come, and where they go.

The worker says of each block of rows which request and which position it is (from the
runner's own batch, in the step itself). Here they are put into their place, and nothing is
handed out before every position of every sequence and layer has come exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import CaptureError
from .transport.messages import Kind, Message, Segment

__all__ = ["Batch"]


class Batch:
    """Rows of one batch.

    Args:
        prompts: token ids of each sequence.
        layer_ids: the layers asked for, in the caller's order, duplicates included.
        hidden_size: width of a row.
        dtype: of the rows.
        first_step: number of its first scheduler step; messages of earlier ones are what an
            abandoned batch left behind, and are passed over.

    Results are tensors ``[tokens, hidden_size]`` on the CPU, each with memory of its own.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        first_step: int = 1,
    ) -> None:
        self.prompts = prompts
        self.layer_ids = list(layer_ids)
        self.layers = sorted(set(layer_ids))
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._index: dict[str, int] = {}
        self._rows = [
            {k: torch.empty(len(p), hidden_size, dtype=dtype) for k in self.layers}
            for p in prompts
        ]
        self._filled = [dict.fromkeys(self.layers, 0) for _ in prompts]
        self._missing = len(prompts) * len(self.layers)
        self._segments: list[Segment] = []
        self._first_step = first_step
        self._step = first_step - 1
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.cancelled = False

    # -- requests ----------------------------------------------------------------------

    def register(self, request_id: str) -> None:
        """The next request of the batch, in the order of the prompts, has this id."""
        if len(self._index) == len(self.prompts):
            raise CaptureError(f"Request {request_id} belongs to no sequence of the batch.")
        self._index[request_id] = len(self._index)

    @property
    def request_ids(self) -> list[str]:
        """Ids in the order of the prompts."""
        return list(self._index)

    def sequence(self, request_id: str) -> int:
        """Which prompt a request is."""
        return self._index[request_id]

    # -- rows --------------------------------------------------------------------------

    def receive(self, message: Message, block: Any) -> None:
        """Takes one message.

        Args:
            message: from the worker.
            block: its payload: a tensor, a buffer, or None.

        Raises:
            CaptureError: it breaks a promise.
        """
        if message.step < self._first_step:
            return
        if message.kind == Kind.STEP:
            self._begin(message)
        elif message.kind == Kind.FAILED:
            raise CaptureError(f"The worker failed while it captured: {message.text}")
        elif message.step != self._step:
            raise CaptureError(
                f"Rows of scheduler step {message.step} came during step {self._step}."
            )
        elif message.kind == Kind.ROWS:
            self._place(message, self._tensor(block, message.rows))
        elif message.kind == Kind.NORMS:
            self._check_norms(message, _plain(block, torch.float32))
        elif message.kind == Kind.POSITIONS:
            self._check_positions(message, _plain(block, torch.int64))

    def fail(self, error: BaseException) -> None:
        """No more rows will come; :meth:`wait` raises this."""
        self._error = self._error or error
        self._done.set()

    @property
    def complete(self) -> bool:
        """Whether every row has come."""
        return self._missing == 0

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until every row has come.

        Returns:
            False if they haven't within ``timeout`` seconds.

        Raises:
            CaptureError: or whatever else went wrong meanwhile.
        """
        finished = self._done.wait(timeout)
        if self._error is not None:
            raise self._error
        return finished

    def result(self, index: int) -> list[torch.Tensor]:
        """The states of one sequence, one tensor for each of ``layer_ids``.

        Raises:
            CaptureError: rows are missing; the message names sequence, layer and position.
        """
        states: list[torch.Tensor] = []
        for place, layer in enumerate(self.layer_ids):
            filled, wanted = self._filled[index][layer], len(self.prompts[index])
            if filled != wanted:
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: {filled} of {wanted} rows came; "
                    f"position {filled} is missing."
                )
            rows = self._rows[index][layer]
            # A layer asked for twice: the caller may change one of the two.
            states.append(rows.clone() if layer in self.layer_ids[:place] else rows)
        return states

    # -- inside ------------------------------------------------------------------------

    def _begin(self, message: Message) -> None:
        if message.step != self._step + 1:
            raise CaptureError(
                f"Scheduler step {message.step} came after step {self._step}."
            )
        self._step = message.step
        self._segments = message.segments()
        for segment in self._segments:
            index = self._index.get(segment.request_id)
            if index is None:
                raise CaptureError(
                    f"The worker computed request {segment.request_id!r}, which isn't in "
                    "this batch."
                )
            length = len(self.prompts[index])
            if segment.start < 0 or segment.count < 1 or segment.start + segment.count > length:
                raise CaptureError(
                    f"Sequence {index}: the worker computed positions {segment.start} to "
                    f"{segment.start + segment.count - 1} of a prompt of {length} tokens."
                )
            for layer in self.layers:
                filled = self._filled[index][layer]
                if segment.start == 0 and filled:
                    # Preempted: vLLM gave its KV blocks away and computes it anew.
                    if filled == length:
                        self._missing += 1
                    self._filled[index][layer] = 0
                elif segment.start != filled:
                    raise CaptureError(
                        f"Sequence {index}, layer {layer}: rows from position "
                        f"{segment.start} on came where position {filled} was next."
                    )

    def _place(self, message: Message, block: torch.Tensor) -> None:
        layer = message.layer
        if layer not in self.layers:
            raise CaptureError(f"Rows of layer {layer} came, which was not asked for.")
        for segment, first, at, count in self._overlaps(message.row, message.rows):
            index = self._index[segment.request_id]
            position = segment.start + first
            filled = self._filled[index]
            if filled[layer] != position:
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: position {position} came where "
                    f"position {filled[layer]} was next."
                )
            self._rows[index][layer][position : position + count] = block[at : at + count]
            filled[layer] = position + count
            if filled[layer] == len(self.prompts[index]):
                self._missing -= 1
        if self._missing == 0:
            self._done.set()

    def _check_norms(self, message: Message, norms: torch.Tensor) -> None:
        if torch.isfinite(norms).all():
            return
        row = message.row + int((~torch.isfinite(norms)).nonzero()[0])
        segment, first, *_ = next(iter(self._overlaps(row, 1)))
        raise CaptureError(
            f"Sequence {self._index[segment.request_id]}, layer {message.layer}, position "
            f"{segment.start + first}: the state is not finite (NaN or infinity). The "
            "model computed it so: look at its weights and dtype."
        )

    def _check_positions(self, message: Message, positions: torch.Tensor) -> None:
        for segment, first, at, count in self._overlaps(message.row, message.rows):
            start = segment.start + first
            expected = torch.arange(start, start + count)
            given = positions[at : at + count]
            if not torch.equal(given, expected):
                wrong = int((given != expected).nonzero()[0])
                raise CaptureError(
                    f"Sequence {self._index[segment.request_id]}: the model was given "
                    f"position {int(given[wrong])} for the row of position "
                    f"{int(expected[wrong])}."
                )

    def _overlaps(self, row: int, rows: int) -> Iterable[tuple[Segment, int, int, int]]:
        """Parts of segments in rows [row, row + rows) of the step.

        Yields:
            The segment, the offset in it, the offset in the block, the number of rows.
        """
        begin, reached = 0, row
        for segment in self._segments:
            end = begin + segment.count
            low, high = max(begin, row), min(end, row + rows)
            if low < high:
                yield segment, low - begin, low - row, high - low
                reached = high
            begin = end
        if reached != row + rows:
            raise CaptureError(
                f"Rows {row} to {row + rows - 1} came in a scheduler step of {begin} rows."
            )

    def _tensor(self, block: Any, rows: int) -> torch.Tensor:
        tensor = _plain(block, self._dtype)
        if tensor.numel() != rows * self._hidden_size:
            raise CaptureError(
                f"A block of {tensor.numel()} values came for {rows} rows of "
                f"{self._hidden_size}."
            )
        return tensor.view(rows, self._hidden_size)


def _plain(block: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(block, torch.Tensor):
        if block.dtype != dtype:
            raise CaptureError(f"Rows of {block.dtype} came where {dtype} was expected.")
        return block
    return torch.frombuffer(block, dtype=dtype)
