"""What the matrix writes down of a cell, from what the suite reports. No engine, no cell."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import evidence  # noqa: E402
import tested_table  # noqa: E402

GENERATOR = {"test_single[llama]": "passed", "test_single[qwen3]": "passed"}
FILES = {"test_preprocessing": "passed", "test_extract": "passed"}


def report(cases: dict[str, str], **more: Any) -> dict[str, Any]:
    packages = {"torch": "2.13.0", "transformers": "5.19.0", "python": "3.11", "vllm": "1"}
    return {"packages": packages, "refused": None, "cases": cases, "deselected": 0, **more}


def cell(cases: dict[str, str], date: str, vllm: str = "0.32.0") -> dict[str, Any]:
    found = evidence.outcome(report(cases))
    return {"vllm": vllm, "speculators": "0.4.0.1", "date": date, **found}


def test_the_name_is_that_of_a_case_of_the_suite() -> None:
    """Renamed there alone, no cell would ever say more than "generator only"."""
    suite = ROOT / "tests" / "conformance" / "test_data_to_files.py"
    assert f"def {evidence.WHOLE}(" in suite.read_text()


@pytest.mark.parametrize(
    ("cases", "extract", "shown"),
    [
        (GENERATOR | FILES, "passed", "data to files"),
        (GENERATOR, "not run", "generator only"),
        (GENERATOR | {"test_extract": "skipped"}, "skipped", "generator only"),
    ],
)
def test_how_far_a_cell_that_works_went(
    cases: dict[str, str], extract: str, shown: str
) -> None:
    found = evidence.outcome(report(cases))
    assert (found["result"], found["extract"]) == ("works", extract)
    assert tested_table.outcome(found) == shown


def test_a_generator_that_works_with_files_that_fail_is_a_failure() -> None:
    found = evidence.outcome(report(GENERATOR | {"test_extract": "failed"}))
    assert (found["result"], found["extract"]) == ("fails", "failed")
    assert "test_extract" in found["reason"]


@pytest.mark.parametrize(
    ("told", "result", "reason"),
    [
        (None, "fails", "didn't come to its end"),
        (report({}), "fails", "no case ran"),
        (report({}, refused="vLLM 9 is unknown"), "refused", "vLLM 9 is unknown"),
        (report({"test_single": "skipped"}), "fails", "0 of 1 cases failed"),
    ],
)
def test_what_is_no_success(told: dict[str, Any] | None, result: str, reason: str) -> None:
    found = evidence.outcome(told)
    assert found["result"] == result
    assert reason in found["reason"]


def test_evidence_from_before_is_not_taken_for_more() -> None:
    old = cell(GENERATOR, "2026-11-29")
    del old["extract"]
    assert tested_table.outcome(old) == "generator only"


class TestPart:
    """Of the suite, as with -k."""

    before = cell(GENERATOR, "2026-11-29")

    def test_adds_the_way_to_files_and_nothing_else(self) -> None:
        (now,) = evidence.known_with([self.before], cell(FILES, "2026-12-01"), part=True)
        assert now == self.before | {"extract": "passed", "extract_date": "2026-12-01"}

    def test_is_no_evidence_for_the_generator(self) -> None:
        assert evidence.known_with([], cell(FILES, "2026-12-01"), part=True) == []
        other = cell(GENERATOR, "2026-12-01")
        assert evidence.known_with([self.before], other, part=True) == [self.before]

    def test_that_fails_is_written_down(self) -> None:
        new = cell({"test_extract": "failed"}, "2026-12-01")
        assert evidence.known_with([self.before], new, part=True) == [new]


def test_the_whole_suite_replaces_what_was_known() -> None:
    old = [cell(GENERATOR, "2026-11-29", vllm) for vllm in ("0.9.0", "0.32.0", "0.100.0")]
    new = cell(GENERATOR | FILES, "2026-12-01")
    assert evidence.known_with(reversed(old), new, part=False) == [old[0], new, old[2]]


def test_a_machine_that_can_not_run_a_cell_takes_nothing_back() -> None:
    old = cell(GENERATOR, "2026-11-29")
    new = {**cell(GENERATOR, "2026-12-01"), "result": "can't run here", "reason": "glibc"}
    assert evidence.known_with([old], new, part=False) == [old]
    assert evidence.known_with([], new, part=False) == [new]
