"""Shared memory, threads and advice that can't be had: another way, or one clear sentence."""

from __future__ import annotations

import errno
import inspect
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rows import peers

from vllm_compat import shm, system, worker_environment
from vllm_compat.arena import Arena, Copier
from vllm_compat.checks.files import check_file
from vllm_compat.extract.cores import Cores
from vllm_compat.transport.messages import Kind
from vllm_compat.transport.shared import Ring, Unavailable, Writer
from vllm_compat.worker.outbox import RingOutbox

from .conftest import python, run, with_small_shm

pytestmark = pytest.mark.timeout(120)

MB = 1 << 20


def refused(number: int = errno.EINVAL) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def written_and_read(ring: Ring) -> None:
    """Another process fills the ring; every byte arrives."""
    sizes = [ring.size // 2 // 64 * 64] * 3
    process = subprocess.Popen(
        [sys.executable, peers.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(["write", vars(ring.offer), sizes, 0.0]) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == "open"
        ring.opened()
        left = len(sizes)
        while left:
            for message in ring.channel.read(timeout=30.0):
                assert bytes(ring.block(message)) == peers.pattern(message.step, sizes[0])
                ring.credit()
                left -= 1
    finally:
        process.kill()
        process.communicate()
        ring.close()


# -- the ring's memory -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_without_memfd(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """conda's Python has no os.memfd_create; a sandbox refuses the call."""
    if how == "missing":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "memfd_create", refused(errno.ENOSYS))
    before = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
    ring = Ring(MB)
    assert ring.kind == "file without a name in /dev/shm"
    link = os.readlink(f"/proc/self/fd/{ring.offer.memory}")
    assert link.endswith(" (deleted)"), "a name that could be opened"
    assert os.stat(f"/proc/self/fd/{ring.offer.memory}").st_mode & 0o77 == 0
    written_and_read(ring)
    left = {*os.listdir("/dev/shm"), *os.listdir("/tmp")} - before
    assert not [name for name in left if link.endswith(f"/{name} (deleted)")]


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_without_posix_fallocate(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "missing":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refused(errno.EOPNOTSUPP))
    ring = Ring(3 * MB)
    assert os.fstat(ring.offer.memory).st_blocks * 512 >= 3 * MB, "pages are not reserved"
    written_and_read(ring)


SMALL_SHM = """
import json, os, sys
from vllm_compat.transport.shared import Ring, Unavailable
if "fallocate" in sys.argv:
    del os.posix_fallocate
del os.memfd_create
ring = Ring(int(sys.argv[1]))
ring.memory[64:] = bytes([7]) * ring.size  # SIGBUS, if it isn't there
print("KIND", ring.kind)
"""


@pytest.mark.parametrize("without", ["", "fallocate"])
def test_a_small_dev_shm_is_left_alone(without: str) -> None:
    """All of it is vLLM's: its queues would end processes with SIGBUS."""
    command = python(SMALL_SHM, str(40 * MB), without)
    done = run(with_small_shm(command, "64m"))
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert done.stdout.startswith("KIND file without a name in ")
    assert "/dev/shm" not in done.stdout
    done = run(with_small_shm(python(SMALL_SHM, str(16 * MB), without), "64m"))
    assert done.stdout == "KIND file without a name in /dev/shm\n", done.stderr


LIMITED = """
import os, resource, sys
import torch  # its own mappings, before the limit
from vllm_compat.arena import Arena
from vllm_compat.errors import CaptureError
from vllm_compat.transport.shared import Ring, Unavailable, Writer
MB = 1 << 20
ring = Ring(600 * MB)
before = len(os.listdir("/proc/self/fd"))
used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 500 * MB, resource.RLIM_INFINITY))
for what in (lambda: Ring(600 * MB), lambda: Writer(ring.offer)):
    try:
        what()
    except Unavailable as reason:
        print("UNAVAILABLE", reason)
assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
arena = Arena()
arena.expect(400 * MB)
kept = arena.empty((300 * MB,), torch.uint8)
del kept  # the arena keeps its memory for another of that size
kept = arena.empty((400 * MB,), torch.uint8)  # and gives it up for one that needs it
try:
    arena.empty((300 * MB,), torch.uint8)
except CaptureError as error:
    print("ERROR", error)
kept.fill_(1)
"""


def test_a_limited_address_space() -> None:
    """``ulimit -v``, as batch systems set it."""
    done = run(python(LIMITED))
    assert done.returncode == 0, done.stdout + done.stderr
    ring, writer, result = done.stdout.splitlines()
    assert ring.startswith("UNAVAILABLE 629145600 bytes can't be mapped: Cannot allocate")
    assert writer.startswith("UNAVAILABLE 629145600 bytes can't be mapped: Cannot allocate")
    assert result.startswith("ERROR There is no memory for the result (314572800 bytes")
    assert result.endswith("Pass fewer sequences at a time, or keep fewer results.")


def test_a_limited_file_size() -> None:
    """``ulimit -f`` counts for memory files, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MB, hard))
    try:
        with pytest.raises(Unavailable, match=r"memfd: .*; file without a name in /dev/shm: "):
            Ring(2 * MB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


GROUP = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from vllm_compat.system import memory
from vllm_compat.transport.shared import Ring, Unavailable
found = memory()
print(found.total >> 20, found.available >> 20)
try:
    Ring(512 << 20)
except Unavailable as reason:
    print(reason)
ring = Ring(16 << 20)
ring.memory[64:] = bytes([7]) * ring.size
"""


def test_a_group_with_less_memory_than_the_ring() -> None:
    """The kernel would end the process that asks for more than its container may have."""
    first, second = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    old = (second / "memory.limit_in_bytes").exists()
    group = (second if old else first) / f"vllm-compat-test-{os.getpid()}"
    limit = group / ("memory.limit_in_bytes" if old else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(200 * MB))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"this user may make no memory group: {error}")
    try:
        done = run(python(GROUP, str(group)))
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
        numbers, reason = done.stdout.splitlines()
        total, available = map(int, numbers.split())
        assert total == 200
        assert 100 < available < 200
        assert "536870976 bytes wanted" in reason
        assert "bytes of memory free" in reason
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def test_limits_of_version_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files as the kernel documents them (cgroup-v2.rst); this machine may have version 1."""
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    for folder, limit in ((tmp_path, "max"), (job.parent, str(300 * MB)), (job, "max")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{280 * MB}\n")
        (folder / "memory.stat").write_text(
            f"anon {80 * MB}\nfile {200 * MB}\n"
            f"inactive_file {150 * MB}\nactive_file {50 * MB}\n"
        )
    lines = system._lines
    monkeypatch.setattr(system, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        system,
        "_lines",
        lambda path: ["0::/slurm/job_7"] if path.name == "cgroup" else lines(path),
    )
    assert system.memory() == system.Memory(300 * MB, 220 * MB)


# -- what only makes it faster -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    class Mapping(mmap.mmap):
        madvise = refused()

    monkeypatch.setattr(mmap, "mmap", Mapping)
    if how == "missing":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    result = Arena().empty((3, MB), torch.bfloat16)
    assert result.fill_(2).sum() == 6 * MB


def test_no_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not every system has the call, and sandboxes refuse it."""
    monkeypatch.setattr(os, "sched_getaffinity", refused(errno.EPERM))
    assert system.usable_cores() == list(range(os.cpu_count() or 1))
    Copier().close()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    worker_environment.bind_to_cores(1)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    cores = Cores(1, wait=0)
    assert len(cores.ids) == 1
    cores.release()


@pytest.mark.parametrize("what", ["folder", "lock"])
def test_cores_that_cannot_be_claimed_are_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    if what == "folder":
        (tmp_path / "file").touch()
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    else:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
        monkeypatch.setattr("fcntl.flock", refused(errno.ENOLCK))
    before = len(os.listdir("/proc/self/fd"))
    assert Cores(1, wait=0).ids == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_advice_about_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    torch.save(
        {
            "input_ids": torch.arange(3),
            "hidden_states": [torch.ones(3, 4)],
            "loss_mask": torch.ones(3, dtype=torch.int64),
        },
        path,
    )
    right = check_file(path)
    monkeypatch.setattr(os, "posix_fadvise", refused(errno.ENOSYS))
    assert check_file(path) == right
    assert not right.wrong


@pytest.mark.parametrize("there", [0, 1])
def test_no_more_threads(monkeypatch: pytest.MonkeyPatch, there: int) -> None:
    """Rows are copied all the same; and none is still being copied afterwards."""
    copier = Copier()
    copier._width = 3
    left = there
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    source = torch.randn(5000, 1000)
    target = torch.zeros_like(source)
    threads = threading.active_count()
    copier([(target, source)])
    assert torch.equal(target, source)
    assert threading.active_count() == threads
    target.zero_()
    copier([(target, source)])
    assert torch.equal(target, source)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_that_cuda_does_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on a disk can't be pinned, say. The error must not come up in vLLM's kernels."""
    device = torch.device("cuda", 0)
    cudart = torch.cuda.cudart()
    register = cudart.cudaHostRegister
    monkeypatch.setattr(
        cudart, "cudaHostRegister", lambda pointer, size, flags: register(0, size, flags)
    )
    ring = Ring(16 * MB)
    outbox = RingOutbox(Writer(ring.offer), device)
    ring.opened()
    assert not outbox._pinned
    rows = torch.arange(3 * 1000, dtype=torch.float32, device=device).view(3, 1000) + 1
    outbox.put(Kind.ROWS, 1, 0, rows)
    outbox.end(1, last=True)
    got = []
    while not got:
        got = [m for m in ring.channel.read(timeout=30.0) if m.kind == Kind.ROWS]
    (message,) = got
    sent = torch.frombuffer(bytearray(ring.block(message)), dtype=torch.float32)
    assert torch.equal(sent.view(3, 1000), rows.cpu())
    outbox.close()
    ring.close()


# -- /dev/shm ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_what_vllm_needs_in_dev_shm() -> None:
    """The numbers of the doctor's threshold are those of the installed vLLM."""
    import vllm
    from vllm import envs
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    parameters = inspect.signature(MessageQueue.__init__).parameters
    chunks = parameters["max_chunks"].default
    need = shm.queues(Path(vllm.__path__[0]), None)
    assert need.replies == chunks * parameters["max_chunk_bytes"].default
    assert need.commands == chunks * envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * MB
    assert shm.queues(Path(vllm.__path__[0]), "3").commands == chunks * 3 * MB


@pytest.mark.parametrize(
    ("checked", "free", "rpc", "level"),
    [
        (True, 240, False, "problem"),
        (True, 241, False, "note"),
        (True, 401, True, "ok"),
        (False, 64, False, "note"),
        (False, 64, True, "problem"),
        (False, 401, True, "ok"),
    ],
)
def test_what_doctor_says(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    checked: bool,
    free: int,
    rpc: bool,
    level: str,
) -> None:
    monkeypatch.setattr(shm, "room", lambda: shm.Room(500 * MB, free * MB))
    source = tmp_path / shm._SOURCE
    source.parent.mkdir(parents=True)
    source.write_text(
        "max_chunk_bytes: int = 1024 * 1024 * 24\n" + "def check_shm_free_space\n" * checked
    )
    found = shm.found(tmp_path, None, rpc)
    assert found is not None
    assert found[0] == level
    assert f"{free} of 500 MB free" in found[1]


DOCTOR = """
import sys
from vllm_compat.cli import main
sys.exit(main(["doctor", "--quick"]))
"""


def test_doctor_measures_dev_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(with_small_shm(python(DOCTOR), "64m"))
    assert "/dev/shm: 64 of 64 MB free; " in done.stdout, done.stdout + done.stderr
    assert "docker run --shm-size=1g, or --ipc=host" in done.stdout
    done = run(with_small_shm(python(DOCTOR), "64m"), VLLM_COMPAT_TRANSPORT="rpc")
    assert done.returncode == 1
    assert "signal 7 (SIGBUS)" in done.stdout
    done = run(python("import os; del os.memfd_create\n" + DOCTOR))
    assert "this process's memory (file without a name in /dev/shm, /proc)" in done.stdout


# -- children of the driver --------------------------------------------------------------------


DRIVER = """
import json, os, sys, time
from vllm_compat.transport.shared import Ring
ring = Ring(1 << 16)
print(json.dumps(vars(ring.offer)), flush=True)
sys.stdin.readline()  # the worker is there
ring.opened()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_a_forked_child_holds_nothing() -> None:
    """Else the worker would wait for a driver that has gone, as long as the child lives."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    driver = subprocess.Popen(
        python(DRIVER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    writer = subprocess.Popen(
        [sys.executable, peers.__file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip
    assert driver.stdin is not None
    assert driver.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout is not None
    child = 0
    try:
        offer = json.loads(driver.stdout.readline())
        writer.stdin.write(json.dumps(["write", offer, [5000] * 100_000, 0.0]) + "\n")
        writer.stdin.flush()
        assert json.loads(writer.stdout.readline()) == "open"
        driver.stdin.write("\n")
        driver.stdin.flush()
        child = int(driver.stdout.readline())
        held = [os.readlink(fd) for fd in Path(f"/proc/{child}/fd").iterdir()]
        maps = Path(f"/proc/{child}/maps").read_text()
        driver.send_signal(signal.SIGKILL)
        driver.wait(timeout=30)
        assert writer.wait(timeout=30) == peers.CLOSED
        assert not [name for name in held if "memfd:vllm-compat" in name]
        assert "memfd:vllm-compat" not in maps
    finally:
        if child:  # it has the driver's standard output, too
            os.kill(child, signal.SIGKILL)
        for process in (driver, writer):
            process.kill()
            process.communicate()


def in_child(function: Any) -> int:
    """Runs something in a forked child; its exit status, 0 if it returned True."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_closes_its_copies_once() -> None:
    """A descriptor that is closed twice may be somebody else's by then."""
    ring = Ring(MB)
    writer = Writer(ring.offer)

    def closed() -> bool:
        numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        ring.close()
        writer.close()
        return all(os.readlink(f"/proc/self/fd/{n}") == "/dev/null" for n in numbers)

    assert in_child(closed) == 0
    writer.memory[64:68] = b"here"
    assert ring.memory[64:68] == b"here", "the parent's own are gone"
    writer.close()
    ring.close()


def test_a_child_keeps_no_memory_of_results() -> None:
    """Memory that the parent writes to again would be there twice."""
    arena = Arena()
    arena.expect(4 * MB)
    result = arena.empty((2 * MB,), torch.uint8)
    result.fill_(3)
    seen = result.numpy()  # torch's threads are not there in a child
    kept = arena.empty((2 * MB,), torch.uint8)
    del kept
    assert arena._kept
    arena._lock.acquire()  # another thread of the parent's may hold it
    try:
        assert in_child(lambda: not arena._free and bool((seen == 3).all())) == 0
    finally:
        arena._lock.release()
    assert arena._free


def test_a_forked_worker_has_the_usual_dtype() -> None:
    """vLLM forks workers where CUDA allows it; the CPU build of the tests spawns them."""
    from vllm_compat.defaults import workers_start

    torch.set_default_dtype(torch.float64)
    try:
        with workers_start():
            assert in_child(lambda: torch.get_default_dtype() == torch.float32) == 0
            assert torch.get_default_dtype() == torch.float64
        assert in_child(lambda: torch.get_default_dtype() == torch.float64) == 0
    finally:
        torch.set_default_dtype(torch.float32)


def test_nothing_is_set_where_nobody_has_a_default() -> None:
    """A forked worker would inherit it, and pay at each call."""
    from torch._C import _len_torch_function_stack

    from vllm_compat.defaults import on_cpu

    with on_cpu():
        assert _len_torch_function_stack() == 0
    with torch.device("meta"), on_cpu():
        assert torch.empty(1).device.type == "cpu"


def test_a_bus_error_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "room", lambda: shm.Room(64 * MB, 0))
    assert shm.ended(signal.SIGKILL) == "signal 9"
    assert "0 of 64 MB free now" in shm.ended(signal.SIGBUS)
