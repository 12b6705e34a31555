"""Writes the tables of tested versions into the pages that have a place for one.

    python scripts/tested_table.py            # rewrites them
    python scripts/tested_table.py --check    # says whether they are what the matrix found

A place is everything between the comments `<!-- tested:short -->` or `<!-- tested:full -->` and
`<!-- /tested -->` in README.md and docs/. What stands there comes from
`vllm_compat/data/tested.json`, which the version matrix writes.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTED = ROOT / "vllm_compat" / "data" / "tested.json"
PLACE = re.compile(r"(<!-- tested:(short|full) -->\n).*?(<!-- /tested -->)", re.DOTALL)
UNTRIED = "not run"
# How much of what users run has passed: from conversations to files, or the generator alone.
WHOLE, PART = "data to files", "generator only"


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def rows(
    cells: list[dict[str, Any]],
) -> tuple[list[str], list[tuple[str, list[dict[str, Any]]]]]:
    """Releases of speculators, and for each vLLM its cells in their order."""
    speculators = sorted({c["speculators"] for c in cells}, key=release)
    vllms = sorted({c["vllm"] for c in cells}, key=release)
    known = {(c["vllm"], c["speculators"]): c for c in cells}
    nothing: dict[str, Any] = {"result": UNTRIED}
    return speculators, [
        (vllm, [known.get((vllm, s), nothing) for s in speculators]) for vllm in vllms
    ]


def outcome(cell: dict[str, Any]) -> str:
    """The result of a cell in the words of the tables."""
    if cell["result"] != "works":
        return str(cell["result"])
    return WHOLE if cell.get("extract") == "passed" else PART


def full(cells: list[dict[str, Any]]) -> str:
    speculators, table = rows(cells)
    lines = [
        "| vLLM | " + " | ".join(f"speculators {s}" for s in speculators)
        + " | torch | transformers | date |",
        "|---" * (len(speculators) + 4) + "|",
    ]  # fmt: skip
    notes: list[str] = []
    for vllm, found in table:
        shown = []
        for cell in found:
            text = outcome(cell)
            if cell["result"] == "works":
                text += f", {cell['passed']} cases"
            elif "reason" in cell:
                if cell["reason"] not in notes:
                    notes.append(cell["reason"])
                text += f" ({notes.index(cell['reason']) + 1})"
            shown.append(text)
        first = next((c for c in found if c.get("torch")), {})
        dates = [c["date"] for c in found if "date" in c]
        lines.append(
            f"| {vllm} | {' | '.join(shown)} | {first.get('torch', '')} "
            f"| {first.get('transformers', '')} | {max(dates)} |"
        )
    lines += [""] if notes else []
    lines += [f"({number}) {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join(lines)


def short(cells: list[dict[str, Any]]) -> str:
    """By generation of speculators.

    0.4.0 and 0.4.0.1 have the same generator and the same preprocessing, file for file: what
    was seen of one holds for the other. Neighbouring vLLM releases with the same outcomes share
    a line.
    """
    generations = sorted({c["speculators"][:3] for c in cells}, key=release)
    _, table = rows(cells)

    def of_generation(found: list[dict[str, Any]], generation: str) -> str:
        seen = {outcome(c) for c in found if c.get("speculators", "").startswith(generation)}
        if WHOLE in seen:
            seen.discard(PART)
        return ", ".join(sorted(seen)) or UNTRIED

    outcomes = [(vllm, [of_generation(found, g) for g in generations]) for vllm, found in table]
    lines = [
        "| vLLM | " + " | ".join(f"speculators {g}" for g in generations) + " |",
        "|---" * (len(generations) + 1) + "|",
    ]
    for same, group in groupby(outcomes, key=lambda row: row[1]):
        names = [vllm for vllm, _ in group]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append(f"| {span} | {' | '.join(same)} |")
    return "\n".join(lines)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, cells: list[dict[str, Any]]) -> str:
    tables = {"short": short(cells), "full": full(cells)}
    return PLACE.sub(lambda m: f"{m.group(1)}\n{tables[m.group(2)]}\n\n{m.group(3)}", text)


def main(argv: list[str]) -> int:
    cells = json.loads(TESTED.read_text())["cells"]
    stale = []
    for page in pages():
        text = page.read_text() if page.exists() else ""
        new = filled(text, cells)
        if new != text:
            stale.append(page)
            if "--check" not in argv:
                page.write_text(new)
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'stale' if '--check' in argv else 'written'}")
    return int(bool(stale) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
