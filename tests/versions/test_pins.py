"""The pins of the matrix: whole for every cell, and what one line stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

CONSTRAINTS = Path(__file__).parents[2] / "constraints"
sys.path.append(str(CONSTRAINTS))
import cells as pinned  # noqa: E402
from cells import Cell  # noqa: E402

TORCHVISION = {"2.8": "0.23", "2.9": "0.24", "2.10": "0.25", "2.11": "0.26", "2.13": "0.28"}
NEEDED = ("pytest", "pytest-timeout", "packaging", "wrapt", "datasets", "transformers")


@pytest.fixture(scope="module")
def table() -> dict[Cell, dict[str, str]]:
    return {cell: pinned.pins(*cell) for cell in pinned.cells()}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `write` writes to, and `pins` reads, in place of the real file."""
    file = tmp_path / "cells.txt"
    file.write_text(pinned.FILE.read_text())
    monkeypatch.setattr(pinned, "FILE", file)
    return file


def test_a_cell_is_itself(table: dict[Cell, dict[str, str]]) -> None:
    assert len(table) == len({c.vllm for c in table}) * len({c.speculators for c in table})
    for cell, pins in table.items():
        assert (pins[pinned.VLLM], pins[pinned.SPECULATORS]) == cell
        assert set(NEEDED) <= set(pins), cell


def test_torchvision_is_that_of_torch(table: dict[Cell, dict[str, str]]) -> None:
    """Another one has operators that torch doesn't know."""
    for cell, pins in table.items():
        torch, torchvision = (pins[name].rsplit(".", 1)[0] for name in ("torch", "torchvision"))
        assert TORCHVISION[torch] == torchvision, cell


def test_datasets_can_make_tensors(table: dict[Cell, dict[str, str]]) -> None:
    """Up to 4.8.3 it imports a name from torchvision that 0.26 has no longer."""
    broken = [
        cell
        for cell, pins in table.items()
        if Version(pins["torchvision"]) >= Version("0.26")
        and Version(pins["datasets"]) < Version("4.8.4")
    ]
    assert broken == []


def test_the_file_is_what_its_own_content_makes(
    copy: Path, table: dict[Cell, dict[str, str]]
) -> None:
    before = copy.read_text()
    pinned.write(table)
    assert copy.read_text() == before


def test_a_new_release_changes_no_other_cell(
    copy: Path, table: dict[Cell, dict[str, str]]
) -> None:
    newest = pinned.cells()[-1].vllm
    new = {
        Cell("99.0.0", cell.speculators): {
            **pins, pinned.VLLM: "99.0.0", "torch": "99.0", "of-99": "1"
        }
        for cell, pins in table.items()
        if cell.vllm == newest
    }  # fmt: skip
    pinned.write(table | new)
    assert {cell: pinned.pins(*cell) for cell in pinned.cells()} == table | new
    assert len(copy.read_text().splitlines()) < 400


@pytest.mark.parametrize(
    ("wanted", "ranges"),
    [
        ("1 2 3 4", [""]),
        ("1 2", ["<3"]),
        ("3 4", [">=3"]),
        ("2", ["==2"]),
        ("2 3", [">=2,<4"]),
        ("1 3", ["<2", "==3"]),
        ("2 4", ["==2", ">=4"]),
    ],
)
def test_ranges(wanted: str, ranges: list[str]) -> None:
    assert pinned._ranges(set(wanted.split()), ["1", "2", "3", "4"]) == ranges


def test_two_versions_of_one_package_are_an_error(copy: Path) -> None:
    cell = pinned.cells()[-1]
    copy.write_text(copy.read_text() + "torch==1.0 ; vllm >=0.30.0\n")
    with pytest.raises(ValueError, match="two versions of torch"):
        pinned.pins(*cell)


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    script = CONSTRAINTS / "cells.py"
    return subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, check=False
    )


def test_the_command_prints_a_requirements_file(table: dict[Cell, dict[str, str]]) -> None:
    cell = Cell("0.16.0", "0.4.0.1")
    done = _command(*cell)
    assert done.returncode == 0, done.stderr
    assert dict(line.split("==") for line in done.stdout.splitlines()) == table[cell]
    listed = [Cell(*line.split()) for line in _command().stdout.splitlines()]
    assert listed == list(table)


def test_the_command_knows_what_there_is_not() -> None:
    done = _command("0.16.0", "0.5.0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no cell with vLLM 0.16.0 and speculators 0.5.0")
