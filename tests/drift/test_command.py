"""``vllm-compat drift VERSION``: a release that isn't installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_compat import drift, wheels
from vllm_compat.errors import UnsupportedEnvironmentError


@pytest.mark.parametrize("text", ["0.33.0", "0.11.0.post2", "0.34.0rc1"])
def test_versions(text: str) -> None:
    assert wheels.is_version(text)


@pytest.mark.parametrize("text", ["/usr/lib", "speculators", "./0.4.0"])
def test_folders(text: str) -> None:
    assert not wheels.is_version(text)


def test_a_wheel_is_read_and_not_installed(tmp_path: Path) -> None:
    package = wheels.unpacked("speculators", "0.3.0", tmp_path)
    assert (package / "__init__.py").is_file()
    assert {file.suffix for file in package.rglob("*") if file.is_file()} == {".py"}
    assert list(tmp_path.glob("speculators-0.3.0/*.dist-info/METADATA"))
    assert not list(tmp_path.rglob("*.whl"))


def test_a_release_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironmentError, match=r"speculators 99\.0"):
        wheels.unpacked("speculators", "99.0", tmp_path)
    done = _drift("--speculators", "99.0")
    assert done.returncode == 2
    assert "speculators 99.0" in done.stderr


def test_the_verdict_says_whether_the_matrix_has_the_cell() -> None:
    """The installed vLLM, which is tested, and a speculators that isn't installed."""
    done = _drift("--speculators", "0.4.0.1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert found["verdict"] == "tested"
    assert found["cell"] == {"vllm": "0.16.0", "speculators": "0.4.0.1"}
    assert not found["add_cell"]
    assert found["findings"] == []


def test_a_cell_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift.tested, "cells", lambda: ())
    found = drift.Drift(drift.detect(), ())
    assert found.verdict == "untested"
    assert found.as_json()["add_cell"]


def _drift(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_compat", "drift", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
