"""The command line where the terminal, or a scheduler's log, knows ASCII alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from guest.processes import HANGS, environment

from vllm_compat.cli import _COMMANDS, main
from vllm_compat.cli.console import any_encoding

ASCII = (
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1:strict"},
    # Python reads C as UTF-8 unless it is told not to.
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
)


def run(*words: str | bytes | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_compat", *words], env=environment(**variables),
        capture_output=True, encoding="utf-8", errors="replace", timeout=HANGS, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of many lengths, under a name that is not ASCII."""
    path = tmp_path_factory.mktemp("daten-ä") / "größe.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for index in range(60):
            words = " ".join(f"t{(index * 7 + k) % 500}" for k in range(3 + index % 40))
            turns = [{"from": "human", "value": words}, {"from": "gpt", "value": words}]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


@pytest.mark.parametrize("variables", ASCII)
def test_help(variables: dict[str, str]) -> None:
    names = "run", "extract", "doctor", "verify", "check", "estimate", "drift"
    assert len(names) == len(_COMMANDS)
    code = "import sys, vllm_compat.cli as c; sys.exit(c.main(sys.argv[1:]))"
    for words in ([], ["--help"], *([name, "--help"] for name in names)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=environment(**variables),
            capture_output=True, check=False, timeout=HANGS,
        )  # fmt: skip
        assert done.returncode == (0 if words else 2), done.stderr
        assert b"usage:" in done.stdout


@pytest.mark.parametrize("variables", ASCII)
def test_estimate(chat_model: Path, data: Path, variables: dict[str, str]) -> None:
    # From a part of the conversations: it says how sure it is, with a sign.
    words = ["estimate", "--model", chat_model, "--data", data, "--sample", "30"]
    done = run(*words, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "samples" in done.stdout
    sign = "\\xb1" if "latin" not in str(variables) else "\N{REPLACEMENT CHARACTER}"
    assert f"({sign} " in done.stdout, done.stdout


@pytest.mark.parametrize("variables", [*ASCII, {}])
@pytest.mark.parametrize("name", ["größe-船".encode(), b"\xff\xfe"])
def test_a_path_in_an_error(tmp_path: Path, name: bytes, variables: dict[str, str]) -> None:
    """Also one that is no UTF-8, which no stream can write."""
    path = os.path.join(os.fsencode(tmp_path), name)
    for words in (["check", path], ["estimate", "--model", path, "--data", path]):
        done = run(*words, **variables)
        assert done.returncode == 1, done.stderr
        assert "UnicodeEncodeError" not in done.stderr
        assert done.stderr.startswith("vllm-compat ")
    done = run("--no-such-option", path, **variables)
    assert done.returncode == 2
    assert "UnicodeEncodeError" not in done.stderr


def test_a_script_under_run_has_its_own_streams(tmp_path: Path) -> None:
    """What can't be written is an error in a user's script, as it is without us."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.stdout.errors); print('\\xb1')")
    done = run("run", script, PYTHONIOENCODING="ascii:strict")
    assert "strict" in done.stdout
    assert "UnicodeEncodeError" in done.stderr


def test_the_streams_are_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout.errors, sys.stderr.errors
    with any_encoding():
        assert sys.stdout.errors == "backslashreplace"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert (sys.stdout.errors, sys.stderr.errors) == before
