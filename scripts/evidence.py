"""What a run of the conformance suite says of a cell, and of what was known of it before.

noxfile.py calls it for each cell of the matrix; what it returns is what
`vllm_compat/data/tested.json` has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# A case of tests/conformance/test_data_to_files.py: the whole command. All cases of
# test_batch_shapes.py see the generator alone.
WHOLE = "test_extract"
PACKAGES = ("torch", "transformers", "python", "libc")


def outcome(report: dict[str, Any] | None) -> dict[str, Any]:
    """The result of a cell from the suite's report (None: it didn't write one)."""
    if report is None:
        return {"result": "fails", "reason": "the suite didn't come to its end"}
    if report["refused"]:
        return {"result": "refused", "reason": report["refused"]}
    cases: dict[str, str] = report["cases"]
    if not cases:
        return {"result": "fails", "reason": "no case ran: the suite didn't get to its first"}
    failed = sorted(name for name, result in cases.items() if result == "failed")
    passed = sum(result == "passed" for result in cases.values())
    found = {
        **{name: report["packages"].get(name) for name in PACKAGES},
        "passed": passed,
        "skipped": sum(result == "skipped" for result in cases.values()),
        "extract": cases.get(WHOLE, "not run"),
    }
    if failed or not passed:
        reason = f"{len(failed)} of {len(cases)} cases failed: {', '.join(failed[:5])}"
        return {"result": "fails", "reason": reason, **found}
    return {"result": "works", **found}


def known_with(
    known: Iterable[dict[str, Any]], new: dict[str, Any], *, part: bool
) -> list[dict[str, Any]]:
    """The cells that are known, with a new outcome of one of them in its place.

    A run of a part of the suite (`pytest -k`) that passed is no evidence for the rest. All that
    it can add to a cell that works is that the way from conversations to files was run. A
    machine that can't run a cell says nothing of it: what another machine found stays.

    Args:
        new: `vllm`, `speculators`, `date` and what :func:`outcome` returns.
        part: whether cases of the suite were left out.
    """
    cells = {(cell["vllm"], cell["speculators"]): cell for cell in known}
    key = (new["vllm"], new["speculators"])
    if new["result"] == "can't run here":
        cells.setdefault(key, new)
    elif not part or new["result"] != "works":
        cells[key] = new
    elif new["extract"] == "passed" and cells.get(key, {}).get("result") == "works":
        cells[key] = {**cells[key], "extract": "passed", "extract_date": new["date"]}
    return sorted(cells.values(), key=lambda cell: _order(cell["vllm"], cell["speculators"]))


def _order(*releases: str) -> list[list[int]]:
    return [[int(part) for part in re.findall(r"\d+", release)] for release in releases]
