"""Faults made for real: exceptions and kills in the worker, interrupts, threads, deletion."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conformance.models import prompt

import vllm_compat

from .conftest import (
    ONE_THREAD,
    Build,
    Checkpoints,
    Subject,
    children,
    generator_of,
    is_running,
    wait_until,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

BATCH = [prompt(100 + i, i) for i in range(6)]
AFTER = [prompt(33, 50), prompt(3, 51), prompt(200, 52)]


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where a shell has started the tests in the background, with SIGINT ignored.

    What the tests start inherits it.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    left = [t for t in threading.enumerate() if t.name.startswith("test-")]
    assert not left


# -- exceptions in the worker ------------------------------------------------------------------


def fails_on_call(number: int, make: Any) -> Any:
    def hook(*_: Any) -> None:
        hook.calls += 1
        if hook.calls == number:
            raise make()

    hook.calls = 0
    return hook


@pytest.mark.parametrize("step", [1, 4])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RuntimeError("something broke"), "RuntimeError: something broke"),
        (MemoryError, "MemoryError"),
        (lambda: AssertionError(), "AssertionError"),
    ],
    ids=["RuntimeError", "MemoryError", "AssertionError"],
)
def test_an_exception_in_mid_batch(shared: Subject, step: int, make: Any, words: str) -> None:
    with (
        shared.hooked(fails_on_call(step, make)),
        pytest.raises(vllm_compat.CaptureError, match=words),
    ):
        shared.generator.generate(BATCH)
    shared.check(AFTER)
    assert not shared.engine.scheduler.requests


def test_an_exception_in_every_batch(shared: Subject) -> None:
    """Nothing heaps up: not in the scheduler, not in its KV blocks, not in the worker."""

    def always(*_: Any) -> None:
        raise ValueError("again")

    pool = shared.engine.scheduler.kv_cache_manager.block_pool
    shared.check(AFTER)
    free = pool.get_num_free_blocks()
    with shared.hooked(always):
        for _ in range(20):
            with pytest.raises(vllm_compat.CaptureError, match="again"):
                shared.generator.generate(BATCH)
    shared.check(AFTER)
    assert pool.get_num_free_blocks() == free
    assert shared.in_worker(lambda w: len(w.model_runner.requests)) <= len(AFTER)


# -- interrupts --------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """A Ctrl-C that reaches this process alone. It always comes before the block is left."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.name = "test-timer"
    timer.start()
    try:
        yield
    finally:
        timer.join()


def slow(seconds: float) -> Any:
    def hook(*_: Any) -> None:
        time.sleep(seconds)

    return hook


def test_an_interrupt_in_mid_batch(shared: Subject) -> None:
    with shared.hooked(slow(1.0)):
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt), interrupt_after(0.5):
            shared.generator.generate(BATCH)
        assert time.monotonic() - begun < 5, "it waited for the whole batch"
    shared.check(AFTER)
    assert not shared.engine.scheduler.requests


def test_two_interrupts(shared: Subject) -> None:
    """The second one comes while the first is being dealt with, or in the next call."""

    def twice() -> None:
        try:
            shared.generator.generate(BATCH)
        except KeyboardInterrupt:
            with contextlib.suppress(vllm_compat.VllmCompatError):
                shared.generator.generate(BATCH)
            raise

    with shared.hooked(slow(0.5)):
        for pause in (0.0, 0.01, 0.1):
            with (
                pytest.raises(KeyboardInterrupt),
                interrupt_after(0.3 + pause),
                interrupt_after(0.3),
            ):
                twice()
    shared.check(AFTER)


def test_interrupts_at_any_moment(shared: Subject) -> None:
    source = random.Random(8)
    begun = time.monotonic()
    shared.generator.generate(BATCH)
    whole = time.monotonic() - begun
    interrupted = 0
    for _ in range(40):
        try:
            with interrupt_after(source.uniform(0, whole)):
                shared.generator.generate(BATCH)
        except KeyboardInterrupt:
            interrupted += 1
        shared.check(AFTER[:2])
    assert interrupted > 10
    shared.check(BATCH)
    assert not shared.engine.scheduler.requests
    assert shared.in_worker(lambda w: len(w.model_runner.requests)) <= len(BATCH)


SCRIPT = """
    import os, sys, threading, time
    import vllm_compat

    def hook(*_):
        time.sleep(0.3)

    def slow(worker):
        worker.model_runner.model.model.layers[1].register_forward_hook(hook)

    def main():
        vllm_compat.apply()
        from speculators.data_generation.vllm_hidden_states_generator import (
            VllmHiddenStatesGenerator,
        )
        generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[1, 3], max_model_len=256)
        pids = generator.executor.collective_rpc("vllm_compat_describe")
        print("workers", *[p["pid"] for p in pids], flush=True)
        {body}

    if __name__ == "__main__":
        main()
"""


@contextlib.contextmanager
def script(folder: Path, place: Path, body: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs a script in a process group of its own; gives it and its worker's pid."""
    file = place / "script.py"
    inside = textwrap.indent(textwrap.dedent(body), " " * 4).strip()
    source = textwrap.dedent(SCRIPT).replace("{body}", inside)
    file.write_text(source)
    with (place / "errors").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, file, folder],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **ONE_THREAD},
        )
        assert process.stdout is not None
        try:
            for text in process.stdout:
                if text.startswith("workers"):
                    yield process, int(text.split()[1])
                    break
            else:
                pytest.fail((place / "errors").read_text()[-3000:])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def told(process: subprocess.Popen[str], word: str) -> str:
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith(word):
            return text.strip()
    raise AssertionError(f"it never said {word!r}")


@pytest.fixture
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("llama")[0]


def test_the_life_of_a_script(folder: Path, tmp_path: Path) -> None:
    """revert(), a fork, a Ctrl-C on its terminal, and an end with a generator in a global."""
    body = """
        global kept
        kept = generator
        batch = [[i % 500 for i in range(s, s + 60)] for s in range(5)]
        first = generator.generate(batch)

        bound = generator.generate
        vllm_compat.revert()
        for call in (generator.generate, bound):
            try:
                call(batch)
            except vllm_compat.EngineDeadError as error:
                assert "have been reverted" in str(error), error
            else:
                raise SystemExit("no error after revert()")
        assert not generator.executor._session.engine.scheduler.requests
        vllm_compat.apply()
        generator.generate(batch)
        print("reverted", flush=True)

        # A data loader's worker: it can't use the generator, and does it no harm.
        pid = os.fork()
        if not pid:
            code = 1
            try:
                generator.generate(batch)
            except vllm_compat.EngineDeadError as error:
                code = 0 if "fork" in str(error) else 2
            generator.executor.shutdown()
            del generator
            os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        generator.generate(batch)
        print("forked", flush=True)

        generator.executor.collective_rpc(slow)
        print("ready", flush=True)
        try:
            while True:
                generator.generate(batch)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        second = generator.generate(batch)
        for a, b in zip(first, second):
            assert (a["input_ids"] == b["input_ids"]).all()
            for x, y in zip(a["hidden_states"], b["hidden_states"]):
                assert (x - y).float().norm() < 0.02 * x.float().norm()

        try:
            generator.generate([[1, 10**9]])
        except ValueError as error:
            global kept_error
            kept_error = error
        print("right", flush=True)
    """
    with script(folder, tmp_path, body) as (process, worker):
        told(process, "reverted")
        told(process, "forked")
        told(process, "ready")
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        told(process, "interrupted")
        told(process, "right")
        assert process.wait(60) == 0, (tmp_path / "errors").read_text()[-3000:]
        assert wait_until(lambda: not is_running(worker)), "the worker outlives its driver"


@pytest.mark.parametrize("when", ["in mid-batch", "between calls"])
def test_the_users_process_is_killed(folder: Path, tmp_path: Path, when: str) -> None:
    """Its workers end too, and the memory with them."""
    body = """
        generator.generate([[1, 2, 3]])
        if {slow}:
            generator.executor.collective_rpc(slow)
        print("ready", flush=True)
        while {slow}:
            generator.generate([[5] * 200] * 20)
        time.sleep(600)
    """.replace("{slow}", str(when == "in mid-batch"))
    with script(folder, tmp_path, body) as (process, worker):
        told(process, "ready")
        time.sleep(0.5)
        assert is_running(worker)
        os.kill(process.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_running(worker)), "the worker outlives its driver"


# -- a worker that is gone ---------------------------------------------------------------------


def assert_dead(subject: Subject, pid: int, how: str) -> None:
    """It says so at once, again and again, and deleting it leaves nothing."""
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(
            vllm_compat.EngineDeadError, match=rf"worker \S+ \(pid {pid}\) ended with {how}"
        ):
            subject.generator.generate(AFTER)
        assert time.monotonic() - begun < 5
    engine = weakref.ref(subject.engine)
    del subject.generator
    # Errors hold what they went through, in circles.
    assert wait_until(lambda: (gc.collect(), engine() is None)[1]), "it is still held"
    assert not is_running(pid)
    assert pid not in children()


def test_killed_in_mid_batch(build: Build) -> None:
    subject = build()
    pid = subject.worker.pid
    subject.generator.generate(AFTER)

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def install(worker: Any) -> None:
        worker.model_runner.model.model.layers[2].register_forward_hook(fails(kill))

    def fails(function: Any) -> Any:
        calls: list[int] = []

        def hook(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 3:
                function()

        return hook

    subject.in_worker(install)
    begun = time.monotonic()
    with pytest.raises(
        vllm_compat.EngineDeadError, match=rf"worker \S+ \(pid {pid}\) ended with signal 9"
    ):
        subject.generator.generate(BATCH)
    assert time.monotonic() - begun < 30
    assert_dead(subject, pid, "signal 9")


def test_killed_from_outside_while_it_computes(build: Build) -> None:
    subject = build()
    pid = subject.worker.pid

    def install(worker: Any) -> None:
        worker.model_runner.model.model.layers[2].register_forward_hook(
            lambda *_: time.sleep(100)
        )

    subject.in_worker(install)
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.name = "test-killer"
    killer.start()
    with pytest.raises(vllm_compat.EngineDeadError, match=rf"pid {pid}\) ended with signal 9"):
        subject.generator.generate(BATCH)
    killer.join()
    assert_dead(subject, pid, "signal 9")


def test_killed_between_calls(build: Build) -> None:
    subject = build()
    pid = subject.worker.pid
    subject.generator.generate(AFTER)
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(pid))
    assert_dead(subject, pid, "signal 9")


def test_a_worker_that_exits(build: Build) -> None:
    subject = build()
    pid = subject.worker.pid

    def leave(*_: Any) -> None:
        os._exit(3)

    def install(worker: Any) -> None:
        worker.model_runner.model.model.layers[2].register_forward_hook(leave)

    subject.in_worker(install)
    with pytest.raises(vllm_compat.EngineDeadError, match=rf"pid {pid}\) ended with exit 3"):
        subject.generator.generate(BATCH)
    assert_dead(subject, pid, "exit 3")


# -- deletion, and more than one ---------------------------------------------------------------


def test_a_deleted_generator_leaves_nothing(applied: Any, folder: Path) -> None:
    """The first one is made and used in a thread; the second dies in a circle of references."""
    environment = dict(os.environ)
    before = children()
    errors: list[BaseException] = []

    def use() -> None:
        try:
            generator = generator_of(folder, layer_ids=[1])
            generator.generate(BATCH)
        except BaseException as error:
            errors.append(error)

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads = threading.active_count()
    thread = threading.Thread(target=use, name="test-use")
    thread.start()
    thread.join()
    assert not errors, errors[0]
    assert wait_until(lambda: children() == before), "a worker is left"
    assert wait_until(lambda: threading.active_count() == threads)
    once = held()  # with what vLLM makes once a process

    generator = generator_of(folder, layer_ids=[1])
    assert dict(os.environ) == environment
    (pid,) = children() - before
    with pytest.raises(ValueError, match="empty"):
        generator.generate([])
    generator.generate(BATCH)
    generator.itself = generator
    generator.executor._session.engine.executor.itself = generator.executor
    del generator
    assert wait_until(lambda: children() == before), "a worker is left"
    assert not is_running(pid)
    assert wait_until(lambda: (gc.collect(), held() <= once)[1]), f"{held()}, before: {once}"
    assert dict(os.environ) == environment


def test_two_side_by_side(shared: Subject, build: Build) -> None:
    other = build(budget=48, max_num_seqs=3)
    for seed in range(3):
        shared.check([prompt(40 + seed, seed), prompt(90, 9)])
        other.check([prompt(70 + seed, seed), prompt(5, 9)])
    batches = [[prompt(30 + seed, 20 + seed), prompt(100, 3)] for seed in range(5)]
    shared.know(*(ids for batch in batches for ids in batch))
    in_threads(
        lambda: [shared.check(batch) for batch in batches],
        lambda: [other.check(batch) for batch in batches],
    )
    # One of them ends in the middle of a batch; the other doesn't mind.
    with other.hooked(slow(0.5)):
        stopper = threading.Timer(1.0, other.close)
        stopper.name = "test-stopper"
        stopper.start()
        with pytest.raises(vllm_compat.EngineDeadError, match=r"shut down|ended with"):
            other.generator.generate(BATCH)
        stopper.join()
        with pytest.raises(vllm_compat.EngineDeadError, match="shut down"):
            other.generator.generate(BATCH)
        other.in_worker = lambda *_: None  # type: ignore[method-assign]
    shared.check(AFTER)


def in_threads(*functions: Callable[[], Any]) -> None:
    """Runs them at the same time; raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), name="test-use") for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_on_one_generator(shared: Subject) -> None:
    def batch(number: int, seed: int) -> list[list[int]]:
        return [prompt(20 + 10 * number, 100 * number + seed), prompt(7, number)]

    def use(number: int) -> None:
        for seed in range(4):
            shared.check(batch(number, seed))

    shared.know(*(ids for n in range(5) for seed in range(4) for ids in batch(n, seed)))
    in_threads(*(partial(use, number) for number in range(5)))
