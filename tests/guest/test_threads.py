"""apply(), revert() and imports in several threads at once."""

from __future__ import annotations

import importlib
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vllm_compat
from vllm_compat import PatchConflictError, activation

from .processes import Zygote
from .state import GENERATOR, State, faults


def at_once(*work: Callable[[], None]) -> None:
    """Runs each in a thread, all begun together; raises the first error of any."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(work))

    def run(function: Callable[[], None]) -> None:
        gate.wait()
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def test_apply_and_revert_at_once(generator_module: Any) -> None:
    before = State()

    def toggle() -> None:
        for _ in range(4):
            vllm_compat.apply()
            vllm_compat.status(workers=False)
            vllm_compat.revert()

    at_once(*[toggle] * 8)
    assert before.differences(State()) == []
    assert not activation.is_active()


def test_blocks_at_once(generator_module: Any) -> None:
    """While any block is open the patches are on; after the last they are off."""
    before = State()
    off_inside = []

    def block() -> None:
        for _ in range(4):
            with vllm_compat.applied():
                time.sleep(random.random() / 100)
                if faults(applied=True):
                    off_inside.append(faults(applied=True))

    at_once(*[block] * 6)
    assert off_inside == []
    assert before.differences(State()) == []


def test_imports_go_on_while_our_finder_comes_and_goes(
    generator_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import walks along sys.meta_path: a finder taken out must not make it miss one."""
    from vllm_compat.imports import ImportWatch

    names = [f"vllm_compat_test_module_{i}" for i in range(600)]
    for name in names:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    done = threading.Event()
    finders = list(sys.meta_path)

    def come_and_go() -> None:
        while not done.is_set():
            watch = ImportWatch({})
            watch.start()
            watch.stop()

    def imports(some: list[str]) -> Callable[[], None]:
        def run() -> None:
            try:
                for name in some:
                    importlib.import_module(name)
            finally:
                done.set()

        return run

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        at_once(come_and_go, imports(names[::2]), imports(names[1::2]))
    finally:
        sys.setswitchinterval(interval)
        for name in names:
            sys.modules.pop(name, None)
    assert sys.meta_path == finders


def test_a_finder_that_goes_while_an_import_is_at_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, without luck: the finder after ours takes ours out."""
    from vllm_compat.imports import ImportWatch

    (tmp_path / "vllm_compat_test_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[str] = []

    class Stops:
        def find_spec(self, name: str, *_: Any) -> None:
            asked.append("stops")
            watch.stop()

    class Next:
        def find_spec(self, name: str, *_: Any) -> None:
            asked.append("next")

    watch = ImportWatch({})
    monkeypatch.setattr(sys, "meta_path", [Stops(), Next(), *sys.meta_path])
    watch.start()
    importlib.import_module("vllm_compat_test_module")
    del sys.modules["vllm_compat_test_module"]
    assert asked == ["stops", "next"]


# -- while the generator is being imported, in processes of their own -----------------------


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.3, 0.8])
def test_apply_while_another_thread_imports(zygote: Zygote, delay: float) -> None:
    assert zygote.call("guest.test_threads:apply_beside_an_import", delay) == []


def apply_beside_an_import(delay: float) -> list[str]:
    """In the child."""

    def apply() -> None:
        time.sleep(delay)
        vllm_compat.apply()

    at_once(lambda: importlib.import_module(GENERATOR) and None, apply)
    found = faults(applied=True)
    vllm_compat.revert()
    return found + faults(applied=False)


def test_apply_and_revert_while_another_thread_imports(zygote: Zygote) -> None:
    assert zygote.call("guest.test_threads:toggle_beside_an_import") == []


def toggle_beside_an_import() -> list[str]:
    """In the child."""
    imported = threading.Event()

    def load() -> None:
        try:
            importlib.import_module(GENERATOR)
        finally:
            imported.set()

    def toggle() -> None:
        while not imported.is_set():
            vllm_compat.apply()
            vllm_compat.revert()

    at_once(load, toggle, toggle)
    found = faults(applied=False)
    vllm_compat.apply()
    return found + faults(applied=True)


def test_apply_from_inside_of_the_import(zygote: Zygote) -> None:
    """Half of the names aren't bound yet, and nothing would tell when they are."""
    message = zygote.call("guest.test_threads:apply_inside_of_an_import")
    assert "while it is being imported" in message
    assert "Nothing was changed" in message


def apply_inside_of_an_import() -> str:
    """In the child: a plugin of vLLM that calls apply() when vLLM imports it, say."""
    messages = []

    class Plugin:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "vllm.v1.structured_output" and not messages:
                try:
                    vllm_compat.apply()
                except PatchConflictError as error:
                    messages.append(str(error))

    sys.meta_path.insert(0, Plugin())
    importlib.import_module(GENERATOR)
    assert faults(applied=False) == []
    assert not activation.is_active()
    vllm_compat.apply()
    assert faults(applied=True) == []
    return messages[0]


def test_apply_again_from_inside_of_the_import(zygote: Zygote) -> None:
    assert zygote.call("guest.test_threads:apply_twice") == []


def apply_twice() -> list[str]:
    """In the child: the patches are on already, so that the import is under our eyes."""
    calls = []

    class Plugin:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "vllm.v1.structured_output" and not calls:
                calls.append(vllm_compat.apply())

    vllm_compat.apply()
    sys.meta_path.insert(0, Plugin())
    importlib.import_module(GENERATOR)
    assert calls
    return faults(applied=True)


def test_imported_past_our_finder(zygote: Zygote) -> None:
    assert zygote.call("guest.test_threads:import_past_the_finder") == []


def import_past_the_finder() -> list[str]:
    """In the child: a finder that stands before ours and asks no other."""
    from importlib.machinery import PathFinder

    vllm_compat.apply()
    sys.meta_path.insert(0, PathFinder)
    importlib.import_module(GENERATOR)
    before = {e.state for e in vllm_compat.status(workers=False).entries}
    return [] if "on" in before and not faults(applied=True) else [str(before)]


def test_a_first_import_that_fails(zygote: Zygote) -> None:
    assert zygote.call("guest.test_threads:import_that_fails_once") == []


def import_that_fails_once() -> list[str]:
    """In the child: a module that vLLM needs can't be imported, until it can."""
    vllm_compat.apply()
    sys.modules["vllm.v1.request"] = None  # type: ignore[assignment]
    try:
        importlib.import_module(GENERATOR)
    except ImportError:
        del sys.modules["vllm.v1.request"]
    states = {e.state for e in vllm_compat.status(workers=False).entries}
    if states != {"waiting", "not needed"}:
        return [f"after the failure: {states}"]
    importlib.import_module(GENERATOR)
    found = faults(applied=True)
    vllm_compat.revert()
    return found + faults(applied=False)


def test_a_fork_while_another_thread_holds_the_lock(zygote: Zygote) -> None:
    assert zygote.call("guest.test_threads:fork_with_the_lock_held") == 0


def fork_with_the_lock_held() -> int:
    """In the child: its own child must not wait for a thread that isn't there."""
    import os

    vllm_compat.apply()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with activation._LOCK:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)
        vllm_compat.revert()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    release.set()
    return status
