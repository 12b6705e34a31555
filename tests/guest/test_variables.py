"""The environment variables, and what a process looks like that only imports the package."""

from __future__ import annotations

import logging
import warnings
from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version

import vllm_compat
from vllm_compat import (
    InvalidInputError,
    UnsupportedEnvironmentError,
    UntestedVersionWarning,
    activation,
    decision,
    tested,
)

from .processes import environment, python
from .state import State, faults


def test_the_kill_switch(
    generator_module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_COMPAT_DISABLE", "1")
    before = State()
    report = vllm_compat.apply()
    with vllm_compat.applied():
        pass
    assert before.differences(State()) == []
    assert not report.active
    assert {e.reason for e in report.entries} == {"VLLM_COMPAT_DISABLE is set"}
    assert "switched off by VLLM_COMPAT_DISABLE" in caplog.text
    assert not vllm_compat.status().active
    assert faults(applied=False) == []


def test_the_kill_switch_has_no_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must be of use where we are in the way: nothing is asked of the environment."""

    def broken(*arguments: Any, **keywords: Any) -> Any:
        raise UnsupportedEnvironmentError("no")

    monkeypatch.setattr(decision, "plan", broken)
    monkeypatch.setenv("VLLM_COMPAT_DISABLE", "1")
    assert not vllm_compat.apply().active
    monkeypatch.setenv("VLLM_COMPAT_DISABLE", "0")
    with pytest.raises(UnsupportedEnvironmentError):
        vllm_compat.apply()


def test_the_kill_switch_overrules_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_DISABLE", "1")
    monkeypatch.setenv("VLLM_COMPAT_SKIP", "no-such-patch")
    monkeypatch.setenv("VLLM_COMPAT_UNTESTED", "maybe")
    assert not vllm_compat.apply().active
    assert not vllm_compat.status().active


@pytest.mark.parametrize("value", ["", "0"])
def test_a_switch_that_is_not_set(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    pytest.importorskip("vllm")
    for name in ("DISABLE", "SKIP", "UNTESTED", "TRANSPORT"):
        monkeypatch.setenv(f"VLLM_COMPAT_{name}", value if name == "DISABLE" else "")
    with vllm_compat.applied() as report:
        assert report.active


def test_a_wrong_value_that_an_argument_overrules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused all the same: it is a mistake, and the next process may have no argument."""
    monkeypatch.setenv("VLLM_COMPAT_UNTESTED", "maybe")
    with pytest.raises(InvalidInputError, match="VLLM_COMPAT_UNTESTED='maybe'"):
        vllm_compat.apply(untested="allow")


def test_skip(generator_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_SKIP", "memory-query, tokenizer-remote-code")
    report = vllm_compat.apply()
    assert report["memory-query"].state == "skipped"
    assert report["tokenizer-remote-code"].state == "skipped"
    assert report["scheduler"].state == "on"
    assert faults(applied=True) == []  # with torch and AutoTokenizer among the originals


def test_skip_of_something_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_COMPAT_SKIP", "memory-query,no-such-patch")
    before = State(deep=False)
    with pytest.raises(InvalidInputError, match=r"VLLM_COMPAT_SKIP.*no-such-patch"):
        vllm_compat.apply()
    assert before.differences(State(deep=False)) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("VLLM_COMPAT_TRANSPORT", "pigeon"), ("VLLM_COMPAT_UNTESTED", "maybe")],
)
def test_a_variable_with_another_value(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv(variable, value)
    before = State(deep=False)
    with pytest.raises(InvalidInputError, match=f"{variable}='{value}' is not one of"):
        vllm_compat.apply()
    assert before.differences(State(deep=False)) == []


@pytest.mark.parametrize("argument", ["transport", "executor", "untested"])
def test_an_argument_with_another_value(argument: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{argument}='x' is not one of"):
        vllm_compat.apply(**{argument: "x"})  # type: ignore[arg-type]


def test_transport(generator_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_TRANSPORT", "rpc")
    with vllm_compat.applied():
        assert activation.options().transport == "rpc"
    with vllm_compat.applied(transport="shared"):
        assert activation.options().transport == "shared"


class TestUntested:
    @pytest.fixture(autouse=True)
    def _nothing_this_new_was_tested(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("vllm")
        monkeypatch.setattr(tested, "newest", lambda package: Version("0.10.9"))
        monkeypatch.setattr(decision, "_WARNED", set())

    def test_warns_once(self) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                with vllm_compat.applied() as report:
                    vllm_compat.apply()
                vllm_compat.revert()
        (warning,) = (w for w in caught if w.category is UntestedVersionWarning)
        assert "0.10.9" in str(warning.message)
        assert warning.filename == __file__  # points at the caller, not at us
        assert any("0.10.9" in note for note in report.notes)

    def test_as_an_error_it_changes_nothing(self) -> None:
        before = State(deep=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntestedVersionWarning)
            with pytest.raises(UntestedVersionWarning):
                vllm_compat.apply()
        assert before.differences(State(deep=False)) == []
        assert not activation.is_active()

    @pytest.mark.parametrize("by_variable", [True, False])
    def test_refuse(self, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
        if by_variable:
            monkeypatch.setenv("VLLM_COMPAT_UNTESTED", "refuse")
        with pytest.raises(UnsupportedEnvironmentError, match=r"0\.10\.9"):
            vllm_compat.apply(untested=None if by_variable else "refuse")
        assert not activation.is_active()

    @pytest.mark.parametrize("by_variable", [True, False])
    def test_allow(self, monkeypatch: pytest.MonkeyPatch, by_variable: bool) -> None:
        if by_variable:
            monkeypatch.setenv("VLLM_COMPAT_UNTESTED", "allow")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntestedVersionWarning)
            with vllm_compat.applied(untested=None if by_variable else "allow"):
                assert activation.is_active()

    def test_an_argument_outweighs_the_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_COMPAT_UNTESTED", "refuse")
        with vllm_compat.applied(untested="allow"):
            assert activation.is_active()


@pytest.mark.parametrize("name", ["vllm", "vllm-compat"])
def test_a_worker_with_other_packages(name: str) -> None:
    """As on another machine of a Ray cluster; the reply is made up, for want of one."""
    vllm = pytest.importorskip("vllm")
    from vllm_compat.engine import _check_same

    same = {"rank": 3, "vllm": vllm.__version__, "vllm-compat": vllm_compat.__version__}
    _check_same(same)
    with pytest.raises(UnsupportedEnvironmentError, match=rf"Worker 3 has {name} 0\.0"):
        _check_same({**same, name: "0.0"})


# -- a process that only imports it ---------------------------------------------------------

IMPORT = """
import sys
from guest.state import State
before = State(deep=False)
import vllm_compat
now = State(deep=False)
assert before.differences(now) == [], before.differences(now)
assert before.brought(now) == set(), before.brought(now)
assert "vllm_compat.patches" not in sys.modules
"""


def test_importing_it_does_nothing() -> None:
    python(IMPORT)


APPLY = """
from guest.state import State
import vllm_compat
before = State(deep=False)
report = vllm_compat.apply()
now = State(deep=False)
assert {e.state for e in report.entries} == {"waiting", "not needed"}
assert before.brought(now) == set(), before.brought(now)
assert len(now.finders) == len(before.finders) + 1
vllm_compat.revert()
assert before.differences(State(deep=False)) == []
"""


def test_apply_imports_nothing_of_theirs() -> None:
    pytest.importorskip("vllm")
    python(APPLY)


def test_no_entry_point_acts_by_itself() -> None:
    """vLLM loads plugins of every package that has some; we have a command and nothing else."""
    found = metadata.distribution("vllm-compat").entry_points
    assert {(e.group, e.name) for e in found} == {("console_scripts", "vllm-compat")}


def test_no_handler_of_ours() -> None:
    """A library leaves it to the program where its log goes."""
    assert logging.getLogger("vllm_compat").handlers == []
    assert logging.getLogger("vllm_compat").level == logging.NOTSET


def test_the_environment_of_these_tests() -> None:
    assert not [name for name in environment() if name.startswith("VLLM_COMPAT_")]
