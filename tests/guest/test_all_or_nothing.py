"""What can't be applied as a whole isn't applied at all, and a sentence says why.

The probes themselves are held against every release in tests/drift; here it is apply() that is
called, on copies of the installed sources in which one thing is different.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vllm_compat
from vllm_compat import UnsupportedEnvironmentError, activation, decision
from vllm_compat.symbols import Sources

from .processes import environment, python
from .state import GENERATOR, State

Change = Callable[[str], str]


def overlay(folder: Path, package: str, file: str, change: Change) -> Path:
    """A package whose files are links to the installed ones, but for one."""
    root = Sources().root(package)
    assert root is not None
    target = folder / package
    parts = Path(file).parts
    for depth in range(len(parts)):
        inner = target.joinpath(*parts[:depth])
        inner.mkdir(parents=True, exist_ok=True)
        for entry in root.joinpath(*parts[:depth]).iterdir():
            if entry.name != parts[depth] and entry.name != "__pycache__":
                (inner / entry.name).symlink_to(entry)
    before = (root / file).read_text()
    after = change(before)
    assert after != before, "the change didn't take"
    (target / file).write_text(after)
    return folder


def sub(pattern: str, replacement: str) -> Change:
    return lambda text: re.sub(pattern, replacement, text, count=1)


CHANGES = {
    "missing": (
        "vllm",
        "v1/core/kv_cache_utils.py",
        sub(r"def get_kv_cache_configs\(", "def plan_all_the_caches("),
        ("vllm.v1.core.kv_cache_utils:get_kv_cache_configs", "kv-cache-config"),
    ),
    "moved": (
        "vllm",
        "v1/core/sched/scheduler.py",
        sub(r"class Scheduler\(", "class MovedScheduler("),
        ("vllm.v1.core.sched.scheduler:Scheduler", "patch scheduler"),
    ),
    "a member missing": (
        "vllm",
        "v1/core/sched/scheduler.py",
        lambda text: text.replace("self.requests", "self.known_requests"),
        ("vllm.v1.core.sched.scheduler:Scheduler.requests", "patch scheduler"),
    ),
    "another signature": (
        "vllm",
        "v1/executor/multiproc_executor.py",
        sub(r"unique_reply_rank: int", "only_rank: int"),
        ("MultiprocExecutor.collective_rpc(method, args, kwargs, unique_reply_rank)",),
    ),
    "a field missing": (
        "vllm",
        "engine/arg_utils.py",
        sub(r"\n    worker_extension_cls: ", "\n    worker_mixin_cls: "),
        ("vllm.engine.arg_utils:EngineArgs(", "worker_extension_cls", "engine-args"),
    ),
    "not what the generator imports": (
        "vllm",
        "v1/structured_output/__init__.py",
        sub("class StructuredOutputManager", "class StructuredOutputs"),
        ("StructuredOutputManager", "imported by speculators' generator itself"),
    ),
    "a seam missing": (
        "speculators",
        "data_generation/vllm_hidden_states_generator.py",
        lambda text: text.replace("MultiprocExecutor", "SomeExecutor"),
        (f"{GENERATOR}:MultiprocExecutor", "row-attribution"),
    ),
    "another generator": (
        "speculators",
        "data_generation/vllm_hidden_states_generator.py",
        sub(r"def generate\(self, token_ids", "def generate(self, batch"),
        ("VllmHiddenStatesGenerator.generate(token_ids)", "generator-door"),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_has_changed(
    what: str, generator_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, file, change, words = CHANGES[what]
    root = overlay(tmp_path, package, file, change) / package
    monkeypatch.setattr(decision, "Sources", lambda: Sources({package: root}))
    before = State()
    with pytest.raises(UnsupportedEnvironmentError) as caught:
        vllm_compat.apply()
    message = str(caught.value)
    for word in (*words, "Nothing was changed", "Newest vLLM tested"):
        assert word in message
    assert "\n" not in message
    assert before.differences(State()) == []
    assert not activation.is_active()
    # And it is as good as new where everything is in its place.
    monkeypatch.undo()
    assert vllm_compat.apply().active


APPLY = """
import sys, vllm_compat
from guest.state import State
before = State(deep=False)
try:
    vllm_compat.apply()
except ImportError as error:
    print(type(error).__name__, error)
now = State(deep=False)
assert before.differences(now) == [], before.differences(now)
assert before.brought(now) == set(), before.brought(now)
assert not any(m.split(".")[0] in ("vllm", "speculators", "torch") for m in sys.modules)
"""


def test_before_anything_is_imported(tmp_path: Path) -> None:
    """The same in a fresh process whose path leads to the changed vLLM first."""
    pytest.importorskip("vllm")
    package, file, change, words = CHANGES["missing"]
    folder = overlay(tmp_path, package, file, change)
    env = environment()
    out = python(APPLY, env={**env, "PYTHONPATH": f"{folder}:{env['PYTHONPATH']}"}).stdout
    assert out.startswith("UnsupportedEnvironmentError")
    assert all(word in out for word in words)
    assert len(out.splitlines()) == 1


def without(folder: Path, *names: str) -> dict[str, str]:
    """An environment in which these can't be found."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Gone:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {names!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Gone())\n"
    )
    env = environment()
    return {**env, "PYTHONPATH": f"{folder}:{env['PYTHONPATH']}"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("vllm",), ("vLLM is not installed", "install vllm")),
        (("speculators",), ("speculators is not installed", "0.3.0", "0.4.0.1")),
        (("vllm", "speculators", "torch", "transformers"), ("vLLM is not installed",)),
    ],
    ids=lambda value: "-".join(value) if value[0].islower() else None,
)
def test_not_installed(tmp_path: Path, names: tuple[str, ...], words: tuple[str, ...]) -> None:
    out = python(APPLY, env=without(tmp_path, *names)).stdout
    assert out.startswith("UnsupportedEnvironmentError")
    assert all(word in out for word in words)
    assert len(out.splitlines()) == 1


def fake_speculators(folder: Path, version: str) -> Path:
    """Like 0.5.0 and later (and 0.2 and earlier): no generator."""
    package = folder / "speculators"
    (package / "data_generation").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "data_generation" / "__init__.py").touch()
    info = folder / f"speculators-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: speculators\nVersion: {version}\n")
    (info / "RECORD").write_text("speculators/__init__.py,,\n")
    return folder


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.0", ("extract_hidden_states", "speculators==0.4.0.1")),
        ("0.7.2.dev4", ("0.7.2.dev4", "extract_hidden_states")),
        ("0.2.0", ("no VllmHiddenStatesGenerator yet", "0.3.0")),
    ],
)
def test_a_speculators_without_the_generator(
    tmp_path: Path, version: str, words: tuple[str, ...]
) -> None:
    pytest.importorskip("vllm")
    env = environment()
    folder = fake_speculators(tmp_path, version)
    out = python(APPLY, env={**env, "PYTHONPATH": f"{folder}:{env['PYTHONPATH']}"}).stdout
    assert f"speculators {version}" in out
    assert all(word in out for word in words)
    assert len(out.splitlines()) == 1


# -- in the middle of it --------------------------------------------------------------------


def test_a_replacement_that_can_not_be_built(
    generator_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(original: Any) -> Any:
        raise ZeroDivisionError

    patches = list(decision.registry())
    last = patches[-1]
    patches[-1] = replace(last, replaces=dict.fromkeys(last.replaces, broken))
    monkeypatch.setattr(decision, "registry", lambda: tuple(patches))
    before = State()
    with pytest.raises(ZeroDivisionError):
        vllm_compat.apply()
    assert before.differences(State()) == []
    assert not activation.is_active()


def test_a_name_that_can_not_be_bound(
    generator_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some have been bound by then; they are put back."""
    bound = []

    class Refusing(type(sys)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "Scheduler":
                raise AttributeError(name)
            bound.append(name)
            super().__setattr__(name, value)

    before = State()
    generator_module.__class__ = Refusing
    try:
        with pytest.raises(AttributeError, match="Scheduler"):
            vllm_compat.apply()
    finally:
        generator_module.__class__ = type(sys)
    assert bound
    assert before.differences(State()) == []
    assert not activation.is_active()


def test_a_conflict_found_while_importing(zygote: Any) -> None:
    """The import fails with that sentence: unpatched, the generator would be wrong."""
    message = zygote.call("guest.test_all_or_nothing:conflict_while_importing")
    assert "VllmConfig was replaced by" in message


def conflict_while_importing() -> str:
    """In the child: another library's import hook is there first."""
    from vllm_compat.imports import ImportWatch

    vllm_compat.apply()

    @contextlib.contextmanager
    def theirs() -> Any:
        yield
        module = sys.modules[GENERATOR]
        original = module.VllmConfig
        module.VllmConfig = lambda **kwargs: original(**kwargs)

    # Inside of ours: executed before our replacements are bound.
    watch = ImportWatch({GENERATOR: theirs})
    watch.start()
    sys.meta_path.append(sys.meta_path.pop(0))
    sys.meta_path.insert(1, sys.meta_path.pop())
    try:
        importlib.import_module(GENERATOR)
    except vllm_compat.PatchConflictError as error:
        assert GENERATOR not in sys.modules
        return str(error)
    return "nothing was raised"
