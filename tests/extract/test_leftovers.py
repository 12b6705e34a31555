"""What a killed process leaves in /dev/shm and in the folder for temporary files."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from vllm_compat.extract.leftovers import Janitor

from .support import alive, wait_until_gone

# As Ray does: the group of processes dies at once, Python's resource tracker with it.
SCRIPT = """
    import os, socket, sys, time, uuid
    from multiprocessing.shared_memory import SharedMemory
    from vllm_compat.extract.leftovers import Janitor

    before = SharedMemory(create=True, size=4096)
    janitor = Janitor(alone=sys.argv[2] == "early")
    ring = SharedMemory(create=True, size=4096)
    name = f"{sys.argv[1]}/{uuid.uuid4()}"
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    if sys.argv[2] == "early":
        time.sleep(2)  # it is killed while the generator is made
    else:
        janitor.watch([os.getpid()])
    print(f"/dev/shm/{before.name}", f"/dev/shm/{ring.name}", name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its name is short: that of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(params=["early", "late"])
def running(
    folder: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[subprocess.Popen[str], list[Path]]]:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(folder), request.param],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        paths = list(map(Path, process.stdout.readline().split()))
        assert all(path.exists() for path in paths)
        try:
            yield process, paths
        finally:
            process.kill()
            paths[0].unlink(missing_ok=True)


def test_a_killed_group_leaves_nothing(
    running: tuple[subprocess.Popen[str], list[Path]],
) -> None:
    process, (before, ring, name) = running
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while (ring.exists() or name.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not ring.exists()
    assert not name.exists()
    assert before.exists()  # it was there before: somebody else's


@pytest.mark.parametrize("dies", [pytest.param("actor", marks=pytest.mark.slow), "node"])
def test_what_ray_kills_leaves_nothing(dies: str) -> None:
    """Ray kills more than the process that died; not a word of vLLM in here."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    class Actor:  # in here: Ray's workers can't import a test's module
        def __init__(self) -> None:
            from vllm_compat.extract.leftovers import Janitor

            self.janitor = Janitor()
            self.ring = SharedMemory(create=True, size=4096)
            self.worker = subprocess.Popen(["sleep", "600"])
            self.janitor.watch([os.getpid()])

        def about(self) -> tuple[int, int, str]:
            return os.getpid(), self.worker.pid, f"/dev/shm/{self.ring.name}"

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20}
    )
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        ray.init(address=cluster.address)
        actor = ray.remote(num_cpus=1)(Actor).remote()
        pid, worker, ring = ray.get(actor.about.remote())
        assert Path(ring).exists()
        if dies == "actor":
            os.kill(pid, signal.SIGKILL)
        else:
            cluster.remove_node(node, allow_graceful=False)
        wait_until_gone({pid})
        deadline = time.monotonic() + 20
        while Path(ring).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(ring).exists()
        if alive(worker):
            os.kill(worker, signal.SIGKILL)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_what_others_make_meanwhile_is_left_alone(folder: Path) -> None:
    janitor = Janitor()
    others = SharedMemory(create=True, size=4096)
    try:
        with socket.socket(socket.AF_UNIX) as mine, socket.socket(socket.AF_UNIX) as vllms:
            mine.bind(str(folder / "mine"))
            vllms.bind(str(folder / str(uuid.uuid4())))
            janitor.watch([])
            janitor.clean()
            assert [path.name for path in folder.iterdir()] == ["mine"]
        assert Path("/dev/shm", others.name).exists()
    finally:
        others.close()
        others.unlink()
