"""The other process in the tests of the transport. Run as a script; imports no torch."""

from __future__ import annotations

import json
import random
import sys
import time

from vllm_compat.transport.messages import Closed, Kind, Message
from vllm_compat.transport.shared import Offer, Ring, Unavailable, Writer

CLOSED, UNAVAILABLE = 7, 8
"""Exit codes: the other end has gone; the memory can't be opened."""


def pattern(block: int, nbytes: int) -> bytes:
    """The content of a block; differs from that of its neighbours everywhere."""
    return random.Random(block).randbytes(nbytes)


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def write(offer: dict[str, object], sizes: list[int], pause: float) -> None:
    """Sends a block of each of the sizes."""
    try:
        writer = Writer(Offer(**offer))  # type: ignore[arg-type]
    except Unavailable as reason:
        sys.stderr.write(str(reason))
        sys.exit(UNAVAILABLE)
    say("open")
    try:
        for block, nbytes in enumerate(sizes):
            offset = writer.reserve(nbytes)
            start = writer.start_of(offset)
            writer.memory[start : start + nbytes] = pattern(block, nbytes)
            writer.send(
                Message(Kind.ROWS, block, rows=1, offset=offset, nbytes=nbytes, text="é" * 3)
            )
            if pause and block % 5 == 0:
                time.sleep(pause)
    except Closed:
        say("closed")
        sys.exit(CLOSED)
    writer.close()


def read(size: int, blocks: int) -> None:
    """Offers a ring, takes some blocks out of it, then does nothing for ever."""
    ring = Ring(size)
    say(vars(ring.offer))
    sys.stdin.readline()
    ring.opened()
    while blocks > 0:
        for message in ring.channel.read(1.0):
            ring.block(message)
            ring.credit()
            blocks -= 1
    say("enough")
    time.sleep(600)


if __name__ == "__main__":
    what, *arguments = json.loads(sys.stdin.readline())
    {"write": write, "read": read}[what](*arguments)
