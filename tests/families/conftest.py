"""Which families run, and where checkpoints and results go.

* By default: the families that their records call fast. ``-m slow_families`` runs the others,
  ``-m "slow_families or not slow_families"`` all. A test named on the command line always runs.
* ``VLLM_COMPAT_FAMILY_CACHE``: folder for the checkpoints (a temporary one otherwise).
* ``VLLM_COMPAT_FAMILY_RESULTS``: file that each result is appended to, one JSON line each;
  ``report.py`` makes docs/families.md from tests/families/results.jsonl.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .cpu_workarounds import write_entry_point

MARK = "slow_families"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if MARK in config.getoption("markexpr", "") or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker(MARK)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(MARK)]


@pytest.fixture(scope="session")
def checkpoint_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for checkpoints; they are made again in another folder if anything differs."""
    given = os.environ.get("VLLM_COMPAT_FAMILY_CACHE")
    return Path(given) if given else tmp_path_factory.mktemp("families")


@pytest.fixture(scope="session")
def workaround_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that brings the workarounds' entry point when it is on PYTHONPATH."""
    folder = tmp_path_factory.mktemp("workarounds")
    write_entry_point(folder)
    return folder
