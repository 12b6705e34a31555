"""Shared memory between two real processes: every byte arrives, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_compat.batch import Batch
from vllm_compat.engine import _Reader
from vllm_compat.errors import CaptureError, EngineDeadError
from vllm_compat.transport.messages import Channel, Closed, Kind, Message, Segment
from vllm_compat.transport.shared import Offer, Ring, Unavailable, Writer
from vllm_compat.worker.outbox import RingOutbox

from . import peers
from .simulated import DTYPE, WIDTH, Case, cases, truth

pytestmark = pytest.mark.timeout(120)

MEMORY = "memfd:vllm-compat"


def start(what: str, *arguments: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, peers.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The peer imports nothing of the tests.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    tell(process, [what, *arguments])
    return process


def tell(process: subprocess.Popen[str], what: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.stderr.read() if process.stderr else ""
    return json.loads(text)


def end(process: subprocess.Popen[str], code: int) -> str:
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    return errors


def descriptors(process: Path = Path("/proc/self")) -> list[str]:
    found = []
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(os.readlink(fd))
    return found


def held_here() -> int:
    """How often this process has such a file open or mapped: its engines do, too."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return maps.count(MEMORY) + sum(MEMORY in d for d in descriptors())


def holders() -> list[int]:
    """Processes that have a memory file of ours open or mapped."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            if entry.name.isdigit() and (
                any(MEMORY in link for link in descriptors(entry))
                or MEMORY in (entry / "maps").read_text()
            ):
                found.append(int(entry.name))
    return found


def receive(ring: Ring, count: int, pause: float = 0.0) -> Iterator[tuple[Message, bytes]]:
    """Takes blocks out of the ring; credits each when the next is asked for."""
    while count:
        for message in ring.channel.read(timeout=5.0):
            yield message, bytes(ring.block(message))
            ring.credit()
            count -= 1
            if pause and count % 7 == 0:
                time.sleep(pause)


# -- every byte arrives ----------------------------------------------------------------------


@given(
    size=st.integers(1, 40).map(lambda n: n * 64),
    fractions=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=80),
    slow=st.sampled_from(["neither", "reader", "writer"]),
)
@settings(max_examples=20, deadline=None)
def test_blocks_of_any_size_arrive(size: int, fractions: list[float], slow: str) -> None:
    """Many more bytes than the ring holds: it wraps around, and the writer has to wait."""
    sizes = [max(1, int(f * size)) for f in fractions] * 3
    ring = Ring(size)
    process = start("write", vars(ring.offer), sizes, 0.001 if slow == "writer" else 0.0)
    try:
        assert line(process) == "open"
        ring.opened()
        got = list(receive(ring, len(sizes), 0.001 if slow == "reader" else 0.0))
        assert [m.step for m, _ in got] == list(range(len(sizes)))
        assert all(m.offset % 64 == 0 and m.text == "ééé" for m, _ in got)
        for (message, block), nbytes in zip(got, sizes, strict=True):
            assert block == peers.pattern(message.step, nbytes), f"block {message.step}"
        end(process, 0)
        with pytest.raises(Closed):
            list(ring.channel.read(timeout=5.0))
    finally:
        process.kill()
        process.communicate()
        ring.close()


def test_the_writer_waits_for_room() -> None:
    """Without a credit it never writes over a block that has not been read."""
    ring = Ring(256)
    process = start("write", vars(ring.offer), [128] * 50, 0.0)
    try:
        assert line(process) == "open"
        ring.opened()
        time.sleep(0.3)
        waiting = [m for _ in range(3) for m in ring.channel.read(timeout=0.2)]
        assert [m.step for m in waiting] == [0, 1], "two blocks fill the ring"
        for message in waiting:
            assert bytes(ring.block(message)) == peers.pattern(message.step, 128)
            ring.credit()
        assert [m.step for m, _ in receive(ring, 48)] == list(range(2, 50))
        end(process, 0)
    finally:
        process.kill()
        process.communicate()
        ring.close()


def test_a_block_larger_than_the_ring_is_refused() -> None:
    ring = Ring(4096)
    writer = Writer(ring.offer)
    with pytest.raises(ValueError, match="4097 bytes in a ring of 4096"):
        writer.reserve(4097)
    assert writer.reserve(4096) == 0
    writer.close()
    ring.close()


@given(
    texts=st.lists(st.text(max_size=300), min_size=1, max_size=20),
    cuts=st.lists(st.integers(1, 200), min_size=1, max_size=50),
)
@settings(max_examples=100, deadline=None)
def test_messages_arrive_whole(texts: list[str], cuts: list[int]) -> None:
    """A pipe gives any number of bytes at a time."""
    sent = [
        Message(Kind.STEP, i, layer=-1, row=i, rows=2**32 - 1, offset=2**63, nbytes=i, text=t)
        for i, t in enumerate(texts)
    ]
    data = b"".join(m.pack() for m in sent)
    read, write = os.pipe()
    channel, got = Channel(read), []
    with contextlib.closing(channel):
        at = index = 0
        while at < len(data):
            step = cuts[index % len(cuts)]
            os.write(write, data[at : at + step])
            got += channel.read(timeout=0)
            at, index = at + step, index + 1
        os.close(write)
    assert got == sent


@given(case=cases(), blocks=st.integers(2, 40))
@settings(max_examples=40, deadline=None)
def test_a_batch_through_the_ring(case: Case, blocks: int) -> None:
    """What a worker captures, with the worker's own sender, until it is a result."""
    ring = Ring(blocks * 64)
    reader = _Reader(ring)
    outbox = RingOutbox(Writer(ring.offer), torch.device("cpu"))
    ring.opened()
    batch = Batch(case.prompts, case.layer_ids, WIDTH, DTYPE)
    for sequence in range(len(case.prompts)):
        batch.register(case.name(sequence))
    batch.start(case.first_step)
    reader.serve(batch)

    def capture() -> None:
        for index, rows in enumerate(case.steps):
            step = case.first_step + index
            outbox.begin(step, case.segments(index))
            outbox.put(Kind.POSITIONS, step, -1, torch.tensor([p for _, p in rows]))
            for layer in case.layers:
                states = torch.stack([truth(s, layer, p + 1)[p] for s, p in rows])
                outbox.put(Kind.NORMS, step, layer, states.float().abs().amax(-1))
                outbox.put(Kind.ROWS, step, layer, states)
            assert outbox.end(step, last=index == len(case.steps) - 1) == []

    thread = threading.Thread(target=capture)
    thread.start()
    assert batch.wait(30)
    thread.join()
    for sequence, prompt in enumerate(case.prompts):
        for layer, states in zip(case.layer_ids, batch.result(sequence), strict=True):
            assert states.tolist() == truth(sequence, layer, len(prompt)).tolist()
    outbox.close()
    reader.stop()
    assert not reader.is_alive()


# -- what the reader does not believe ----------------------------------------------------------


def served() -> tuple[Writer, _Reader, Batch]:
    ring = Ring(4096)
    writer = Writer(ring.offer)
    ring.opened()
    batch = Batch([[1, 2, 3]], [0], WIDTH, DTYPE)
    batch.register("r")
    reader = _Reader(ring)
    reader.serve(batch)
    writer.send(Message.of_segments(1, [Segment("r", 0, 3)]))
    return writer, reader, batch


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(4096, 12), (4090, 12), (0, 4097), (2**64 - 1, 12), (2**63, 2**63)]
)
def test_an_offset_outside_of_the_ring(offset: int, nbytes: int) -> None:
    writer, reader, batch = served()
    writer.send(Message(Kind.NORMS, 1, layer=0, rows=3, offset=offset, nbytes=nbytes))
    with pytest.raises(CaptureError, match=f"{nbytes} of 4096 bytes"):
        batch.wait(10)
    assert reader.is_alive(), "one bad message is not the end of the ring"
    writer.close()
    reader.stop()


def test_a_block_of_another_size_than_its_rows() -> None:
    writer, reader, batch = served()
    writer.send(Message(Kind.NORMS, 1, layer=0, rows=3, offset=0, nbytes=16))
    with pytest.raises(
        CaptureError, match=r"Sequence 0, layer 0, position 0: a block of 16 bytes"
    ):
        batch.wait(10)
    writer.close()
    reader.stop()


def test_text_that_is_none() -> None:
    """A header whose text isn't UTF-8: the ring can't be read on, and says so."""
    writer, reader, batch = served()
    data = Message(Kind.FAILED, 1, text="ab").pack()
    os.write(writer._messages, data[:-2] + b"\xff\xfe")
    with pytest.raises(CaptureError, match="can't be read any more"):
        batch.wait(10)
    writer.close()
    reader.stop()


@pytest.mark.parametrize("change", ["token", "size", "memory", "pid", "other-file"])
def test_an_offer_of_somebody_else(change: str, tmp_path: Path) -> None:
    """On another machine the same pid and descriptor are another process's."""
    ring = Ring(4096)
    offer = vars(ring.offer).copy()
    if change == "token":
        offer["token"] = "00" * 16
    elif change == "size":
        offer["size"] = 8192
    elif change == "memory":
        offer["memory"] = 10**6
    elif change == "pid":
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        offer["pid"] = dead.pid
    else:
        file = (tmp_path / "file").open("wb+")
        file.write(b"\1" * (4096 + 64))
        file.flush()
        offer["memory"] = file.fileno()
    before = len(descriptors())
    process = start("write", offer, [1], 0.0)
    errors = end(process, peers.UNAVAILABLE)
    assert "another machine" in errors or "can't be opened" in errors
    with pytest.raises(Unavailable):
        Writer(Offer(**offer))
    gc.collect()
    if change != "pid":
        assert len(descriptors()) <= before + 3, "a descriptor was left open"
    ring.close()


# -- either side is killed ---------------------------------------------------------------------


def assert_whole(blocks: Iterator[tuple[Message, bytes]]) -> None:
    for message, block in blocks:
        assert block == peers.pattern(message.step, 5000), "half a block"


def test_the_writer_is_killed() -> None:
    files = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
    before = held_here()
    ring = Ring(1 << 20)
    process = start("write", vars(ring.offer), [5000] * 100_000, 0.001)
    assert line(process) == "open"
    ring.opened()
    blocks = receive(ring, 100_000)
    for _ in range(20):
        next(blocks)
    assert held_here() > before
    assert process.pid in holders()
    process.send_signal(signal.SIGKILL)
    with pytest.raises(Closed):
        assert_whole(blocks)
    end(process, -signal.SIGKILL)
    ring.credit()  # nobody reads it any more; not the reader's business
    ring.close()
    assert held_here() == before
    assert process.pid not in holders()
    left = {*os.listdir("/dev/shm"), *os.listdir("/tmp")} - files
    assert not [name for name in left if "vllm-compat" in name], left


def test_the_batch_fails_when_its_writer_is_killed() -> None:
    ring = Ring(1 << 20)
    reader = _Reader(ring)
    batch = Batch([[1, 2, 3]], [0], WIDTH, DTYPE)
    process = start("write", vars(ring.offer), [100] * 100_000, 0.1)
    assert line(process) == "open"
    ring.opened()
    reader.serve(batch)
    batch.start(10**6)  # what it sends is of no interest
    process.kill()
    with pytest.raises(EngineDeadError):
        batch.wait(30)
    process.communicate()
    reader.stop()


@pytest.mark.parametrize("blocks", [0, 30])
def test_the_reader_is_killed(blocks: int) -> None:
    """The writer waits for room (0) or is on its way (30): it notices and ends."""
    reading = start("read", 1 << 16, blocks)
    offer = line(reading)
    writing = start("write", offer, [5000] * 100_000, 0.0)
    assert line(writing) == "open"
    tell(reading, "the writer is there")
    assert line(reading) == "enough"
    assert {reading.pid, writing.pid} <= set(holders())
    reading.send_signal(signal.SIGKILL)
    end(reading, -signal.SIGKILL)
    end(writing, peers.CLOSED)
    assert not {reading.pid, writing.pid} & set(holders()), "memory outlives its processes"


# -- nothing is left behind --------------------------------------------------------------------


def test_no_name_and_no_leak() -> None:
    gc.collect()
    before = sorted(descriptors())
    mapped = Path("/proc/self/maps").read_text().count(MEMORY)
    for _ in range(100):
        ring = Ring(1 << 16)
        writer = Writer(ring.offer)
        ring.opened()
        names = {d for d in descriptors() if MEMORY in d}
        assert names == {f"/{MEMORY} (deleted)"}, "a name that could be opened"
        writer.close()
        ring.close()
        ring.close()
    gc.collect()
    assert sorted(descriptors()) == before
    assert Path("/proc/self/maps").read_text().count(MEMORY) == mapped


def test_descriptors_above_1023() -> None:
    """select() refuses them; a long-lived process has that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1300:
        pytest.skip("this user may not open that many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
    try:
        ring = Ring(256)
        assert ring.offer.memory > 1023
        writer = Writer(ring.offer)
        ring.opened()
        for step in range(10):
            offset = writer.reserve(200)
            writer.send(Message(Kind.ROWS, step, offset=offset, nbytes=200))
            assert [m.step for m, _ in receive(ring, 1)] == [step]
        writer.close()
        ring.close()
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
