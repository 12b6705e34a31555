"""Sends captured rows from the worker.

Order of messages, for each scheduler step: STEP, then for each layer NORMS and its ROWS in
blocks, POSITIONS and TOKENS as soon as they are known, END. REPLIED passes them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
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

    def end(self, step: int, last: bool) -> list[Message]: ...

    def replied(self, step: int) -> None: ...

    def wait_for(self, event: Any) -> None: ...

    def close(self) -> None: ...

    @property
    def memory(self) -> str: ...


class ReplyOutbox:
    """Keeps everything for the reply of the step's RPC: vLLM's own queue carries it.

    For workers that can't reach the driver's memory. Slower: rows pass through one pickle and,
    in large steps, a socket. Blocks are arrays of bytes, since vLLM's queue sends the memory of
    arrays beside the pickle (from 0.11.1 on), and that of tensors not.
    """

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def begin(self, step: int, segments: list[Segment]) -> None:
        self._messages = [Message.of_segments(step, segments)]

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        block = tensor.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
        self._messages.append(Message(kind, step, layer, rows=tensor.shape[0], payload=block))

    def end(self, step: int, last: bool) -> list[Message]:
        messages, self._messages = self._messages, []
        return [*messages, Message(Kind.END, step)]

    def replied(self, step: int) -> None:
        """Nothing: the reply is all there is."""

    def wait_for(self, event: Any) -> None:
        event.synchronize()

    def close(self) -> None:
        self._messages = []

    @property
    def memory(self) -> str:
        """What memory carries the rows."""
        return "vLLM's message queue"


class RingOutbox:
    """Copies rows into the driver's ring.

    On a CPU the copy is done when ``put`` returns, and the driver is told at once. On a GPU
    it runs on a stream of its own while the next layers compute, and the driver is told as
    soon as the worker's thread comes by after the copy has finished. There is no thread for
    it: between steps vLLM's worker spins for the next one, and holds Python's lock nearly all
    the time, so that each message of another thread waited 5 ms for it.

    Args:
        writer: the worker's end of the ring.
        device: where the captured tensors live.
    """

    def __init__(self, writer: Writer, device: torch.device) -> None:
        self._writer = writer
        self._staging = torch.frombuffer(writer.memory, dtype=torch.uint8)
        self._stream: Any = None
        self._pinned = False
        self._waiting: deque[tuple[Any, Message]] = deque()
        if device.type == "cuda":
            self._pin(device)
            self._stream = torch.cuda.Stream(device)

    def begin(self, step: int, segments: list[Segment]) -> None:
        self._send(None, Message.of_segments(step, segments))

    def put(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        if self._stream is None:
            self._copy(kind, step, layer, tensor)
            return
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._copy(kind, step, layer, tensor)
        # The allocator must not give this memory away while the copy still reads it.
        tensor.record_stream(self._stream)
        while self._waiting and self._waiting[0][0].query():
            self._deliver()

    def end(self, step: int, last: bool) -> list[Message]:
        """All of the step's tensors are in.

        Args:
            step: its number.
            last: no step follows that could deliver what is still being copied.
        """
        self._send(None, Message(Kind.END, step))
        while last and self._waiting:
            self._deliver()
        return []

    def replied(self, step: int) -> None:
        """Passes what is still being copied: the driver may take the reply."""
        self._writer.send(Message(Kind.REPLIED, step))

    def wait_for(self, event: Any) -> None:
        """Waits for an event of the device; delivers meanwhile."""
        while self._waiting and not event.query():
            self._deliver()
        event.synchronize()

    def close(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._staging.data_ptr())
            self._pinned = False
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._writer.close()

    @property
    def memory(self) -> str:
        """What memory carries the rows."""
        return self._writer.kind

    # -- inside ------------------------------------------------------------------------

    def _copy(self, kind: int, step: int, layer: int, tensor: torch.Tensor) -> None:
        count = tensor.shape[0]
        width = tensor[0].numel() * tensor.element_size()
        block = max(1, self._writer.size // _BLOCKS_PER_RING // width)
        for row in range(0, count, block):
            part = tensor[row : row + block]
            nbytes = part.shape[0] * width
            offset = self._reserve(nbytes)
            start = self._writer.start_of(offset)
            target = self._staging[start : start + nbytes].view(tensor.dtype).view(part.shape)
            target.copy_(part, non_blocking=self._stream is not None)
            event = None
            if self._stream is not None:
                event = torch.cuda.Event()
                event.record(self._stream)
            self._send(event, Message(kind, step, layer, row, part.shape[0], offset, nbytes))

    def _reserve(self, nbytes: int) -> int:
        # The driver gives room back only for blocks that it has been told of.
        while (offset := self._writer.reserve(nbytes, wait=not self._waiting)) is None:
            self._deliver()
        return offset

    def _send(self, event: Any, message: Message) -> None:
        if self._stream is None:
            self._writer.send(message)
        else:
            self._waiting.append((event or _DONE, message))

    def _deliver(self) -> None:
        """Waits for the oldest copy and tells the driver."""
        event, message = self._waiting.popleft()
        event.synchronize()
        self._writer.send(message)

    def _pin(self, device: torch.device) -> None:
        # Pinned, so that the device copies by itself; without it the copy would still be
        # right, but would make the compute stream wait.
        size = self._staging.numel()
        result = torch.cuda.cudart().cudaHostRegister(self._staging.data_ptr(), size, 0)
        self._pinned = int(result[0] if isinstance(result, tuple) else result) == 0
        if not self._pinned:
            # CUDA keeps the error, and torch raises it after the next kernel, whoever's that
            # is. So let it be this one. (torch has no cudaGetLastError.)
            with contextlib.suppress(RuntimeError):
                torch.ones(1, dtype=torch.float32, device=device).add_(1)
            log.warning("vllm-compat: %d bytes could not be pinned; copies are slower.", size)


class _Done:
    """The event of a message that waits for no copy."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


_DONE = _Done()
