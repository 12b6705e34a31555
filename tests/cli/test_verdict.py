"""`doctor` and `apply()` never disagree: exit status 0 means that apply() puts patches on.

In this process for all combinations of our variables and of environments; in processes of
their own, with the import of vLLM, for what only that can find out.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guest.processes import environment, python
from guest.test_all_or_nothing import CHANGES, overlay, without
from packaging.version import Version

import vllm_compat
from vllm_compat import decision, tested
from vllm_compat.cli import machine, main
from vllm_compat.inspection import registry
from vllm_compat.symbols import Sources

from .conftest import command

pytest.importorskip("vllm")

PATCHES = ",".join(patch.name for patch in registry())
VALUES: dict[str, tuple[str | None, ...]] = {
    "VLLM_COMPAT_DISABLE": (None, "", "0", "1"),
    "VLLM_COMPAT_SKIP": (None, "memory-query", "memory-query, no-such-patch", PATCHES),
    "VLLM_COMPAT_UNTESTED": (None, "warn", "refuse", "allow", "maybe"),
    "VLLM_COMPAT_TRANSPORT": (None, "rpc", "pigeon"),
}
INSTALLED = (
    "as it is",
    "newer than tested",
    "no vllm",
    "no speculators",
    "missing",
    "a seam missing",
)

EVERY = list(itertools.product(INSTALLED, itertools.product(*VALUES.values())))
# Each case by itself, and a sample of the combinations: the same one in each run.
ALONE = [
    (installed, tuple(value if name == variable else None for name in VALUES))
    for installed in INSTALLED[:2]
    for variable, values in VALUES.items()
    for value in values
]
CASES = list(dict.fromkeys([*ALONE, *random.Random(14).sample(EVERY, 40)]))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    vllm_compat.revert()
    for name in VALUES:
        monkeypatch.delenv(name, raising=False)
    # They don't decide, and each asks other processes: once is enough.
    for name in ("facts", "shared_memory"):
        monkeypatch.setattr(machine, name, functools.cache(getattr(machine, name)))
    yield monkeypatch
    vllm_compat.revert()


def install(installed: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes this process see that environment."""
    if installed == "newer than tested":
        patch.setattr(tested, "newest", lambda package: Version("0.10.9"))
    elif installed.startswith("no "):
        roots: Any = {installed.removeprefix("no "): None}
        patch.setattr(decision, "Sources", lambda: Sources(roots))
    elif installed != "as it is":
        package, file, change, _ = CHANGES[installed]
        if not (folder / package).exists():
            overlay(folder, package, file, change)
        patch.setattr(decision, "Sources", lambda: Sources({package: folder / package}))


def applies() -> bool:
    """Whether apply() puts patches on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return vllm_compat.apply().active
    except vllm_compat.VllmCompatError:
        return False
    finally:
        vllm_compat.revert()


def test_they_agree(
    clean: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disagree = []
    outcomes = set()
    for installed, values in CASES:
        given = {n: v for n, v in zip(VALUES, values, strict=True) if v is not None}
        with clean.context() as patch:
            install(installed, tmp_path / installed.replace(" ", "-"), patch)
            for name, value in given.items():
                patch.setenv(name, value)
            said = main(["doctor", "--quick"])
            verdict = capsys.readouterr().out.splitlines()[-1:]
            does = applies()
        assert said in (0, 1)
        outcomes.add(does)
        if (said == 0) != does:
            disagree.append(
                f"{installed}, {given}: doctor exits {said} {verdict}, apply: {does}"
            )
    assert not disagree, "\n".join(disagree)
    assert outcomes == {True, False}


def test_it_says_what_apply_raises(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean.setenv("VLLM_COMPAT_TRANSPORT", "pigeon")
    clean.setenv("VLLM_COMPAT_UNTESTED", "maybe")
    with pytest.raises(vllm_compat.InvalidInputError) as caught:
        vllm_compat.apply()
    assert main(["doctor", "--quick", "--json"]) == 1
    problems = [
        f for f in json.loads(capsys.readouterr().out)["findings"] if f["level"] == "problem"
    ]
    assert [(f["about"], f["text"]) for f in problems] == [("settings", str(caught.value))]
    for word in ("TRANSPORT='pigeon'", "auto, shared, rpc", "UNTESTED='maybe'", "refuse"):
        assert word in str(caught.value)


def test_status_says_the_same(clean: pytest.MonkeyPatch) -> None:
    """Outside of an apply(), it is what that would do; it was read as if nothing were asked."""
    clean.setattr(tested, "newest", lambda package: Version("0.10.9"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a question is no reason to warn
        assert any("0.10.9" in note for note in vllm_compat.status().notes)
    clean.setenv("VLLM_COMPAT_UNTESTED", "refuse")
    with pytest.raises(vllm_compat.UnsupportedEnvironmentError, match="are refused"):
        vllm_compat.status()


def test_a_warning_that_is_an_error(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(tested, "newest", lambda package: Version("0.10.9"))
    clean.setattr(decision, "_WARNED", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", vllm_compat.UntestedVersionWarning)
        with pytest.raises(vllm_compat.UntestedVersionWarning):
            vllm_compat.apply()
        assert main(["doctor", "--quick"]) == 1


def test_a_warning_is_not_printed(
    clean: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is one of the notes."""
    clean.setattr(tested, "newest", lambda package: Version("0.10.9"))
    clean.setattr(decision, "_WARNED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["doctor", "--quick"]) == 0
    assert caught == []
    assert "newest: 0.10.9" in capsys.readouterr().out


# -- in processes of their own --------------------------------------------------------------

OUTCOME = """
import importlib
import vllm_compat
from vllm_compat.environment import GENERATOR
try:
    vllm_compat.apply()
    {then}
except vllm_compat.VllmCompatError as error:
    print(type(error).__name__, error)
"""
IMPORT = "importlib.import_module(GENERATOR)"


@pytest.mark.parametrize("name", ["vllm", "speculators"])
def test_a_package_is_missing(tmp_path: Path, name: str) -> None:
    env = without(tmp_path, name)
    out = python(OUTCOME.format(then=""), env=env).stdout
    assert out.startswith("UnsupportedEnvironmentError")
    done = command(["-m", "vllm_compat", "doctor", "--json"], env=env)
    assert done.returncode == 1, done.stderr
    (problem,) = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "problem"]
    assert f"{problem['text'].removesuffix('.')}; {problem['advice']}".rstrip("; ") in out


def ahead(folder: Path) -> dict[str, str]:
    """An environment in which the packages in that folder come first."""
    env = environment()
    return {"PYTHONPATH": f"{folder}:{env['PYTHONPATH']}"}


THEIRS = "def VllmConfig(**parts): return _before(**parts)\n"


@pytest.mark.engine
def test_a_conflict(tmp_path: Path) -> None:
    """Another library's VllmConfig in the generator's module: only the import shows it."""
    overlay(
        tmp_path,
        "speculators",
        "data_generation/vllm_hidden_states_generator.py",
        lambda text: f"{text}\n_before = VllmConfig\n{THEIRS}",
    )
    env = {**environment(), **ahead(tmp_path)}
    # vLLM logs to standard output before it.
    *_, message = python(OUTCOME.format(then=IMPORT), env=env).stdout.splitlines()
    assert message.startswith("PatchConflictError")
    done = command(["-m", "vllm_compat", "doctor", "--json"], env=ahead(tmp_path), timeout=600)
    assert done.returncode == 1, done.stderr
    (problem,) = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "problem"]
    assert message == f"PatchConflictError {problem['text']}"
