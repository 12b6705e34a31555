"""Writes docs/patches.md from the records; --check only compares.

python scripts/patch_table.py [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_compat.patches import REGISTRY

from vllm_compat.environment import GENERATOR
from vllm_compat.record import Patch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "patches.md"

HEAD = """# The patches

Made from the records in `patches/` by `scripts/patch_table.py`; don't edit. Names without a
module are those in `{generator}`. Where a version range and the installed files disagree, the
files win.
"""


def section(patch: Patch) -> str:
    """One patch, in Markdown."""
    ranges = [
        f"{package} {specifier}"
        for package, specifier in (
            ("vLLM", patch.vllm),
            ("speculators", patch.speculators),
            ("transformers", patch.transformers),
        )
        if specifier
    ]
    replaced = [seam.removeprefix(f"{GENERATOR}:") for seam in patch.replaces]
    around = [f"the import of `{module}`" for module in patch.around_import]
    rows = [
        ("Without it", patch.why),
        ("Needed with", ", ".join(ranges) or "every version"),
        ("Replaces", ", ".join([*(f"`{name}`" for name in replaced), *around])),
        ("Feature", f"`{patch.feature}`" if patch.feature else ""),
        ("Side", patch.side),
        ("Source", patch.upstream),
        ("Delete when", patch.delete_when),
    ]
    if patch.relies_on:
        symbols = ", ".join(f"`{symbol.path.rpartition('.')[2]}`" for symbol in patch.relies_on)
        rows.append(("Relies on", symbols))
    body = "\n".join(f"| {name} | {text} |" for name, text in rows if text)
    return f"\n## {patch.name}\n\n| | |\n|---|---|\n{body}\n"


def page() -> str:
    """The whole page."""
    return HEAD.format(generator=GENERATOR) + "".join(section(patch) for patch in REGISTRY)


def main() -> int:
    if "--check" in sys.argv[1:]:
        same = PAGE.is_file() and PAGE.read_text("utf-8") == page()
        print("docs/patches.md is up to date" if same else "docs/patches.md is out of date")
        return 0 if same else 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
