"""A ring of shared memory between one worker and the driver.

The memory has no name that another process could guess, and is freed by the kernel when both
processes are gone, however they went. It is a memfd where there is one, which doesn't count
against the size of /dev/shm (64 MB in a default container); ``memory`` knows what else will
do. The worker opens it, and the two pipes, through ``/proc/<pid of the driver>/fd``, so that
nothing has to be passed along when workers are started, and vLLM's executors can stay as they
are.

    driver                                      worker
    Ring.create() ── Offer (ints, token) ──────▶ Ring.open(offer)
    Channel  ◀────── messages (pipe) ────────── Writer
    credit() ──────── blocks read (pipe) ──────▶ Writer.reserve()
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import sys
import weakref
from collections import deque
from dataclasses import dataclass

from .memory import nameless
from .messages import Channel, Closed, Message, readable

__all__ = ["Offer", "Ring", "Unavailable", "Writer"]

_TOKEN = 16
_ALIGN = 64
_CREDIT = b"\x01"  # one byte for each block that has been read


class Unavailable(Exception):
    """There is no memory to share, or this process can't reach it; the message says why."""


@dataclass(frozen=True)
class Offer:
    """What a worker needs to open the ring; plain values, safe to send anywhere.

    Attributes:
        pid: process id of the driver.
        memory: its file descriptor of the memory.
        messages: of the pipe that the worker writes to.
        credits: of the pipe that the worker reads from.
        size: bytes of the ring.
        token: the first bytes of the memory, random; a worker on another machine, where the
            same pid and descriptor are somebody else's file, notices by them.
        kind: what the memory is, in words.
    """

    pid: int
    memory: int
    messages: int
    credits: int
    size: int
    token: str
    kind: str


def _mapped(fd: int, size: int) -> mmap.mmap:
    """The memory in this process.

    Raises:
        Unavailable: it may not have so much more (``ulimit -v``).
    """
    try:
        return mmap.mmap(fd, size + _ALIGN, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise Unavailable(f"{size} bytes can't be mapped: {error.strerror}") from error


_ENDS: weakref.WeakSet[Ring | Writer] = weakref.WeakSet()


def _let_go() -> None:
    for end in list(_ENDS):
        end.close()


# A child of this process would keep pipes open and memory in use that it has no use for: the
# other end would never learn that this process has gone.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class Ring:
    """The driver's end.

    Args:
        size: bytes for rows in flight; a worker that is further ahead waits.

    Attributes:
        kind: what the memory is, in words.

    Raises:
        Unavailable: there is no such memory here, or not so much of it.
    """

    def __init__(self, size: int) -> None:
        if not sys.platform.startswith("linux"):
            raise Unavailable("shared memory without a name needs Linux")
        self.size = -(-size // _ALIGN) * _ALIGN
        self.kind = ""
        self.channel = Channel(-1)
        self._token = secrets.token_bytes(_TOKEN)
        self._messages_write = self._credits_read = self._credits_write = -1
        try:
            self._file, self.kind = nameless(self.size + _ALIGN)
        except OSError as error:
            raise Unavailable(error.strerror) from error
        _ENDS.add(self)
        try:
            self.memory = _mapped(self._file.fileno(), self.size)
            self.memory[:_TOKEN] = self._token
            read, self._messages_write = os.pipe()
            self.channel = Channel(read)
            self._credits_read, self._credits_write = os.pipe()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise Unavailable(f"no pipe can be had: {error.strerror}") from error
            raise

    @property
    def offer(self) -> Offer:
        return Offer(
            os.getpid(), self._file.fileno(), self._messages_write, self._credits_read,
            self.size, self._token.hex(), self.kind,
        )  # fmt: skip

    def opened(self) -> None:
        """Closes this process's copies of the worker's ends, once the worker has its own.

        From then on a worker that dies closes the pipe, and the reader notices.
        """
        for name in ("_messages_write", "_credits_read"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)

    def block(self, message: Message) -> memoryview:
        """The block that a message speaks of.

        Raises:
            ValueError: it lies outside of the ring.
        """
        if message.offset + message.nbytes > self.size:
            raise ValueError(
                f"a block at {message.offset}+{message.nbytes} of {self.size} bytes"
            )
        start = _ALIGN + message.offset
        return memoryview(self.memory)[start : start + message.nbytes]

    def credit(self) -> None:
        """Tells the worker that a block has been read."""
        # A worker that died in between is noticed by whoever waits for its reply.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._credits_write, _CREDIT)

    def close(self) -> None:
        """Gives all of it back; safe to call twice."""
        self.opened()
        self.channel.close()
        if self._credits_write >= 0:
            os.close(self._credits_write)
            self._credits_write = -1
        self._file.close()
        # A view that still exists keeps the mapping until it goes.
        with contextlib.suppress(AttributeError, BufferError):
            self.memory.close()


class Writer:
    """The worker's end.

    Args:
        offer: from :attr:`Ring.offer`.

    Raises:
        Unavailable: the driver's descriptors can't be opened from here.

    Attributes:
        kind: what the memory is, in words.
    """

    def __init__(self, offer: Offer) -> None:
        self.size, self.kind = offer.size, offer.kind
        self._messages = self._credits = -1
        memory = self._open(offer, offer.memory, os.O_RDWR)
        try:
            # Another process may have the same pid on this machine, if the driver is on
            # another one, and something else under the same descriptor.
            if os.fstat(memory).st_size != offer.size + _ALIGN:
                raise Unavailable("the driver is on another machine")
            self.memory = _mapped(memory, offer.size)
        finally:
            os.close(memory)
        if self.memory[:_TOKEN].hex() != offer.token:
            self.memory.close()
            raise Unavailable("the driver is on another machine")
        _ENDS.add(self)
        try:
            self._messages = self._open(offer, offer.messages, os.O_WRONLY)
            self._credits = self._open(offer, offer.credits, os.O_RDONLY)
        except Unavailable:
            self.close()
            raise
        self._head = 0  # where the next block goes
        self._used = 0  # bytes from the oldest block in flight to the head
        self._taken: deque[int] = deque()  # what each block takes, gaps included

    @staticmethod
    def _open(offer: Offer, fd: int, flags: int) -> int:
        path = f"/proc/{offer.pid}/fd/{fd}"
        try:
            return os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{path} can't be opened: {error.strerror}") from error

    def reserve(self, nbytes: int, wait: bool = True) -> int | None:
        """Finds room for a block.

        Args:
            nbytes: its length.
            wait: until the driver has read older ones, if need be.

        Returns:
            Its offset in the ring, aligned to 64 bytes. None if there is no room and
            ``wait`` is False.

        Raises:
            ValueError: the block is larger than the ring.
            Closed: the driver has gone.
        """
        length = -(-nbytes // _ALIGN) * _ALIGN
        if length > self.size:
            raise ValueError(f"a block of {nbytes} bytes in a ring of {self.size}")
        self._collect(wait=False)
        if not self._used:
            self._head = 0
        gap = self.size - self._head if self._head + length > self.size else 0
        while self._used + gap + length > self.size:
            if not wait:
                return None
            self._collect(wait=True)
            if not self._used:
                self._head, gap = 0, 0
        offset = 0 if gap else self._head
        self._head = (offset + length) % self.size  # ends exactly at the end: begin anew
        self._used += gap + length
        self._taken.append(gap + length)
        return offset

    def _collect(self, wait: bool) -> None:
        while wait or readable(self._credits, 0):
            data = os.read(self._credits, 1 << 12)
            if not data:
                raise Closed
            for _ in data:
                self._used -= self._taken.popleft()
            wait = False

    def start_of(self, offset: int) -> int:
        """Where a block lies in :attr:`memory`."""
        return _ALIGN + offset

    def send(self, message: Message) -> None:
        """Writes one message.

        Raises:
            Closed: the driver has gone.
        """
        data = memoryview(message.pack())
        try:
            while data:
                data = data[os.write(self._messages, data) :]
        except BrokenPipeError as error:
            raise Closed from error

    def close(self) -> None:
        """Gives all of it back; safe to call twice."""
        for name in ("_messages", "_credits"):
            if (fd := getattr(self, name)) >= 0:
                os.close(fd)
                setattr(self, name, -1)
        with contextlib.suppress(BufferError):
            self.memory.close()
