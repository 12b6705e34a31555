"""Sends captured rows from the worker.

Order of messages, for each scheduler step: STEP, then for each layer NORMS and its ROWS in
blocks, POSITIONS as soon as they are known, END.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..transport.messages import Kind, Message, Segment
from ..transport.shared import Writer

__all__ = ["Outbox", "ReplyOutbox", "RingOutbox"]

log = logging.getLogger("vllm_compat")

_BLOCKS_PER_RING = 8  # so that the driver reads one block while the next is being copied


class Outbox(Protocol):
    """Where captured tensors go. Tensors handed in are not changed by anybody afterwards."""

    def begin(self, step: int, segments: list[Segment]) -> None: ...

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None: ...

    def end(self, step: int) -> list[Message]: ...

    def close(self) -> None: ...


class ReplyOutbox:
    """Keeps everything for the reply of the step's RPC: vLLM's own queue carries it.

    For workers that can't reach the driver's memory. Slower: tensors are pickled.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def begin(self, step: int, segments: list[Segment]) -> None:
        self._messages = [Message.of_segments(step, segments)]

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        self._messages.append(
            Message(kind, step, layer, rows=tensor.shape[0], payload=tensor.cpu())
        )

    def end(self, step: int) -> list[Message]:
        messages, self._messages = self._messages, []
        return [*messages, Message(Kind.END, step)]

    def close(self) -> None:
        self._messages = []


class RingOutbox:
    """Copies rows into the driver's ring.

    On a CPU the copy is done when ``put`` returns. On a GPU it runs on a stream of its own
    while the next layers compute, and a thread tells the driver when it is done.

    Args:
        writer: the worker's end of the ring.
        device: where the captured tensors live.
    """

    def __init__(self, writer: Writer, device: torch.device) -> None:
        self._writer = writer
        self._staging = torch.frombuffer(writer.memory, dtype=torch.uint8)
        self._stream: Any = None
        self._pinned = False
        self._todo: queue.SimpleQueue[tuple[Any, Message] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if device.type == "cuda":
            self._pin()
            self._stream = torch.cuda.Stream(device)
            self._thread = threading.Thread(
                target=self._run, name="vllm-compat-outbox", daemon=True
            )
            self._thread.start()

    def begin(self, step: int, segments: list[Segment]) -> None:
        self._send(None, Message.of_segments(step, segments))

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        if self._stream is None:
            self._copy(kind, step, layer, tensor, lambda: None)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._copy(kind, step, layer, tensor, self._record)
        # The allocator must not give this memory away while the copy still reads it.
        tensor.record_stream(self._stream)

    def end(self, step: int) -> list[Message]:
        self._send(None, Message(Kind.END, step))
        return []

    def close(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(timeout=10)
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._staging.data_ptr())
            self._pinned = False
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._writer.close()

    # -- inside ------------------------------------------------------------------------

    def _copy(
        self, kind: int, step: int, layer: int, tensor: torch.Tensor, record: Callable[[], Any]
    ) -> None:
        count = tensor.shape[0]
        width = tensor[0].numel() * tensor.element_size()
        block = max(1, self._writer.size // _BLOCKS_PER_RING // width)
        for row in range(0, count, block):
            part = tensor[row : row + block]
            nbytes = part.shape[0] * width
            offset = self._writer.reserve(nbytes)
            start = self._writer.start_of(offset)
            target = self._staging[start : start + nbytes].view(tensor.dtype).view(part.shape)
            target.copy_(part, non_blocking=self._stream is not None)
            self._send(
                record(), Message(kind, step, layer, row, part.shape[0], offset, nbytes)
            )

    def _record(self) -> Any:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _send(self, event: Any, message: Message) -> None:
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._writer.send(message)
        else:
            self._todo.put((event, message))

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            event, message = item
            try:
                if event is not None:
                    event.synchronize()
                self._writer.send(message)
            except BaseException as error:
                self._error = error
                return

    def _pin(self) -> None:
        # Pinned, so that the device copies by itself; without it the copy would still be
        # right, but would make the compute stream wait.
        size = self._staging.numel()
        address = ctypes.c_void_p(self._staging.data_ptr()).value
        result = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        self._pinned = int(result[0] if isinstance(result, tuple) else result) == 0
        if not self._pinned:
            log.warning("vllm-compat: %d bytes could not be pinned; copies are slower.", size)
