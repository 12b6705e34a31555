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

from .arena import Arena, Copier
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
        arena: where results get their memory.
        copier: copies rows into them.

    Results are tensors ``[tokens, hidden_size]`` on the CPU, each with memory of its own.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        layer_ids: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        arena: Arena | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.prompts = prompts
        self.layer_ids = list(layer_ids)
        self.layers = sorted(set(layer_ids))
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._index: dict[str, int] = {}
        arena = arena or Arena()
        self._copy = copier or Copier()
        arena.expect(sum(map(len, prompts)) * len(self.layers) * hidden_size * dtype.itemsize)
        self._rows = [
            {k: arena.empty((len(p), hidden_size), dtype) for k in self.layers} for p in prompts
        ]
        self._filled = [dict.fromkeys(self.layers, 0) for _ in prompts]
        self._missing = len(prompts) * len(self.layers)
        self._segments: list[Segment] = []
        self._first_step, self._step = 1, 0
        self._placed = dict.fromkeys(self.layers, 0)  # rows of this step
        self._finite = dict.fromkeys(self.layers, 0)  # rows of this step known to be finite
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

    def start(self, step: int) -> None:
        """Its first scheduler step has this number.

        Messages of earlier ones are what an abandoned batch left behind; they are passed
        over.
        """
        self._first_step, self._step = step, step - 1

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
            self._end()
            self._begin(message)
        elif message.kind == Kind.FAILED:
            raise CaptureError(f"The worker failed while it captured: {message.text}")
        elif message.step != self._step:
            raise CaptureError(
                f"Rows of scheduler step {message.step} came during step {self._step}."
            )
        elif message.kind == Kind.ROWS:
            self._place(message, self._tensor(message, block, self._dtype, self._hidden_size))
        elif message.kind == Kind.NORMS:
            self._check_norms(message, self._tensor(message, block, torch.float32))
        elif message.kind == Kind.POSITIONS:
            self._check_positions(message, self._tensor(message, block, torch.int64))
        elif message.kind == Kind.TOKENS:
            self._check_tokens(message, self._tensor(message, block, torch.int64))
        elif message.kind == Kind.END:
            self._end()
        else:
            raise CaptureError(f"The worker sent a message of unknown kind {message.kind}.")

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
            raise CaptureError(f"Scheduler step {message.step} came after step {self._step}.")
        self._step = message.step
        try:
            self._segments = message.segments()
        except (ValueError, TypeError) as error:
            raise CaptureError(f"The worker sent a step that can't be read: {error}") from error
        self._placed = dict.fromkeys(self.layers, 0)
        self._finite = dict.fromkeys(self.layers, 0)
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
                if segment.start == 0 and 0 < filled < length:
                    # Preempted: vLLM gave its KV blocks away and computes it anew.
                    self._filled[index][layer] = 0
                elif segment.start != filled:
                    raise CaptureError(
                        f"Sequence {index}, layer {layer}: rows from position "
                        f"{segment.start} on came where {_next(filled, length)}."
                    )

    def _end(self) -> None:
        """Of a step: all of its rows must have come, of every layer."""
        count = sum(segment.count for segment in self._segments)
        for layer, placed in self._placed.items():
            if placed < count:
                index, position = self._at(placed)
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: the row of position {position} did "
                    f"not come ({placed} of {count} rows of scheduler step {self._step})."
                )

    def _place(self, message: Message, block: torch.Tensor) -> None:
        layer = self._layer(message)
        next_row = self._placed[layer]
        if message.row > next_row:
            index, position = self._at(next_row)
            raise CaptureError(
                f"Sequence {index}, layer {layer}: the row of position {position} did not "
                f"come, later ones of scheduler step {self._step} did."
            )
        if message.row < next_row:
            index, position = self._at(message.row)
            raise CaptureError(
                f"Sequence {index}, layer {layer}: position {position} came where row "
                f"{next_row} of scheduler step {self._step} was next."
            )
        pairs = []
        for segment, first, at, count in self._overlaps(message.row, message.rows):
            index = self._index[segment.request_id]
            position = segment.start + first
            filled = self._filled[index]
            if filled[layer] != position:
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: position {position} came where "
                    f"{_next(filled[layer], len(self.prompts[index]))}."
                )
            if message.row + at + count > self._finite[layer]:
                raise CaptureError(
                    f"Sequence {index}, layer {layer}: position {position} came before it "
                    "was known to be finite."
                )
            rows = self._rows[index][layer]
            pairs.append((rows[position : position + count], block[at : at + count]))
            filled[layer] = position + count
            self._placed[layer] += count
            if filled[layer] == len(self.prompts[index]):
                self._missing -= 1
        self._copy(pairs)
        if self._missing == 0:
            self._done.set()

    def _check_norms(self, message: Message, norms: torch.Tensor) -> None:
        layer = self._layer(message)
        if message.row != self._finite[layer]:
            raise CaptureError(
                f"{self._where(message)}: the norm of row {message.row} of the step came "
                f"where that of row {self._finite[layer]} was next."
            )
        finite = torch.isfinite(norms)
        if not finite.all():
            index, position = self._at(message.row + int((~finite).nonzero()[0]))
            raise CaptureError(
                f"Sequence {index}, layer {layer}, position {position}: the state is not "
                "finite (NaN or infinity). The model computed it so: look at its weights "
                "and dtype."
            )
        self._finite[layer] += message.rows

    def _check_positions(self, message: Message, positions: torch.Tensor) -> None:
        for segment, first, at, count in self._overlaps(message.row, message.rows):
            start = segment.start + first
            self._compare(
                "position", segment, start, positions[at : at + count],
                torch.arange(start, start + count, dtype=torch.int64, device="cpu"),
            )  # fmt: skip

    def _check_tokens(self, message: Message, tokens: torch.Tensor) -> None:
        for segment, first, at, count in self._overlaps(message.row, message.rows):
            start = segment.start + first
            prompt = self.prompts[self._index[segment.request_id]]
            self._compare(
                "token", segment, start, tokens[at : at + count],
                torch.tensor(
                    prompt[start : start + count], dtype=torch.int64, device="cpu"
                ),
            )  # fmt: skip

    def _compare(
        self, what: str, segment: Segment, start: int, given: torch.Tensor, right: torch.Tensor
    ) -> None:
        """What the model was given for the rows of a segment from ``start`` on."""
        if not torch.equal(given, right):
            wrong = int((given != right).nonzero()[0])
            raise CaptureError(
                f"Sequence {self._index[segment.request_id]}, position {start + wrong}: the "
                f"model was given {what} {int(given[wrong])} for this row, not "
                f"{int(right[wrong])}."
            )

    def _at(self, row: int) -> tuple[int, int]:
        """Sequence and position of a row of the step."""
        segment, first, *_ = next(iter(self._overlaps(row, 1)))
        return self._index[segment.request_id], segment.start + first

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

    def _layer(self, message: Message) -> int:
        if message.layer not in self._placed:
            raise CaptureError(f"{self._where(message)}: that layer was not asked for.")
        return message.layer

    def _tensor(
        self, message: Message, block: Any, dtype: torch.dtype, width: int | None = None
    ) -> torch.Tensor:
        """The payload of a message: [rows], or [rows, width]."""
        count = message.rows * (width or 1)
        if not isinstance(block, torch.Tensor):
            size = 0 if block is None else len(block)
            if not count or size != count * dtype.itemsize:
                raise CaptureError(
                    f"{self._where(message)}: a block of {size} bytes came for {count} "
                    f"values of {dtype}."
                )
            if memoryview(block).readonly:  # it came over a socket; torch wants to write
                block = bytearray(block)
            block = torch.frombuffer(block, dtype=dtype)
        elif block.dtype != dtype or block.numel() != count:
            raise CaptureError(
                f"{self._where(message)}: a block of {block.numel()} values of "
                f"{block.dtype} came for {count} of {dtype}."
            )
        return block if width is None else block.view(message.rows, width)

    def _where(self, message: Message) -> str:
        """What a message is about, in words."""
        index, position = self._at(message.row)
        layer = f", layer {message.layer}" if message.layer >= 0 else ""
        return f"Sequence {index}{layer}, position {position}"


def _next(filled: int, length: int) -> str:
    return "the sequence was complete" if filled == length else f"position {filled} was next"
