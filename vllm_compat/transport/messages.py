"""The messages about captured rows, and their layout on a pipe.

Nothing is pickled: a message is a fixed header of integers, followed for a few kinds by
UTF-8 text. Both ends check what they read; a message that can't be right is an error, never
an index into memory.
"""

from __future__ import annotations

import json
import os
import select
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Channel", "Closed", "Kind", "Message", "Segment", "readable"]


class Kind:
    """What a message says."""

    STEP = 1  # text: the segments of this scheduler step, in the order of its rows
    ROWS = 2  # a block of rows of one layer
    NORMS = 3  # float32: the largest absolute value of each row of one layer
    POSITIONS = 4  # int64: the positions that the model was given
    FAILED = 5  # text: what went wrong in the worker
    END = 6  # everything of this step has been sent
    TOKENS = 7  # int64: the token ids that the model was given
    REPLIED = 8  # the reply to the step's RPC is on its way; its rows may still be coming


_HEADER = struct.Struct("<BiIIIQQI")  # kind, layer, step, row, rows, offset, nbytes, text


@dataclass(frozen=True)
class Segment:
    """Neighbouring rows of one request in a scheduler step.

    Attributes:
        request_id: vLLM's request id.
        start: position in the prompt of the first of the rows.
        count: how many rows.
    """

    request_id: str
    start: int
    count: int


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        kind: of :class:`Kind`.
        step: number of the scheduler step; counts on over all batches of a generator.
        layer: decoder layer (ROWS, NORMS).
        row: first row of the block within the step.
        rows: number of rows.
        offset: where the block begins in the ring, in bytes.
        nbytes: its length.
        text: JSON or a sentence.
        payload: the block itself, where no ring carries it (a numpy array of its bytes).
    """

    kind: int
    step: int
    layer: int = -1
    row: int = 0
    rows: int = 0
    offset: int = 0
    nbytes: int = 0
    text: str = ""
    payload: Any = None

    @staticmethod
    def of_segments(step: int, segments: list[Segment]) -> Message:
        """The STEP message."""
        text = json.dumps([[s.request_id, s.start, s.count] for s in segments])
        return Message(Kind.STEP, step, rows=sum(s.count for s in segments), text=text)

    def segments(self) -> list[Segment]:
        """The segments of a STEP message."""
        return [Segment(str(r), int(s), int(c)) for r, s, c in json.loads(self.text)]

    def pack(self) -> bytes:
        text = self.text.encode()
        return (
            _HEADER.pack(
                self.kind, self.layer, self.step, self.row, self.rows,
                self.offset, self.nbytes, len(text),
            )
            + text
        )  # fmt: skip


class Closed(Exception):
    """The other end of the pipe is gone."""


def readable(fd: int, timeout: float) -> bool:
    """Whether a read would not block, after waiting for at most ``timeout`` seconds."""
    # Not select(): it refuses descriptors above 1023, which a large process has.
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


class Channel:
    """Reads messages from a pipe.

    Args:
        fd: the read end; owned by this object.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def read(self, timeout: float) -> Iterator[Message]:
        """Yields the messages that are there, waiting for the first up to ``timeout`` s.

        Raises:
            Closed: the writer has gone.
        """
        if readable(self._fd, timeout):
            chunk = os.read(self._fd, 1 << 16)
            if not chunk:
                raise Closed
            self._buffer += chunk
        while (message := self._take()) is not None:
            yield message

    def _take(self) -> Message | None:
        if len(self._buffer) < _HEADER.size:
            return None
        kind, layer, step, row, rows, offset, nbytes, length = _HEADER.unpack_from(self._buffer)
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        text = self._buffer[_HEADER.size : end].decode()
        del self._buffer[:end]
        return Message(kind, step, layer, row, rows, offset, nbytes, text)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
