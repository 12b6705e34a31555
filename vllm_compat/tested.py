"""The versions that the test matrix has passed on, as it wrote them down."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

__all__ = ["cells", "newest"]


@lru_cache(maxsize=1)
def cells() -> tuple[dict[str, Any], ...]:
    """The cells of the matrix: versions, date, result, number of cases passed.

    ``extract`` is "passed" where the way from conversations to files was run too
    (``tests/conformance/test_data_to_files.py``). Where it is "not run" or missing, only the
    generator was.
    """
    # importlib.resources takes as long to import as the rest of apply() does.
    file = Path(__file__).with_name("data") / "tested.json"
    try:
        return tuple(json.loads(file.read_text("utf-8"))["cells"])
    except FileNotFoundError:
        return ()


def newest(package: str) -> Version | None:
    """The newest version of that package in a cell that works; None if there is none."""
    versions = [Version(c[package]) for c in cells() if c.get("result") == "works"]
    return max(versions, default=None)
