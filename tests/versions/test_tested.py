"""What has been tested: the record is whole, and the pages say what the record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTED = ROOT / "vllm_compat" / "data" / "tested.json"

sys.path.append(str(ROOT / "constraints"))
from cells import cells  # noqa: E402

RELEASES = sorted({cell.vllm for cell in cells()}, key=Version)
NEWEST_OF_MINOR = {Version(vllm).release[:2]: vllm for vllm in RELEASES}.values()


def record() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(TESTED.read_text())["cells"]
    return found


def works(cell: dict[str, str]) -> bool:
    return cell["result"] == "works"


def test_no_cell_fails() -> None:
    assert [c for c in record() if c["result"] == "fails"] == []


def test_what_does_not_work_says_why() -> None:
    for cell in record():
        assert cell["result"] in ("works", "refused", "can't run here")
        assert works(cell) or cell["reason"]


def test_every_minor_works_with_both_generations() -> None:
    """The newest patch release of each."""
    known = {(c["vllm"], c["speculators"][:3]) for c in record() if works(c)}
    assert {(vllm, s) for vllm in NEWEST_OF_MINOR for s in ("0.3", "0.4")} - known == set()


def test_the_documented_and_the_newest_work_with_every_speculators() -> None:
    known = {(c["vllm"], c["speculators"]) for c in record() if works(c)}
    assert {cell for cell in cells() if cell.vllm in ("0.16.0", RELEASES[-1])} <= known


def test_the_pages_say_what_the_record_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "tested_table.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + "run scripts/tested_table.py"
