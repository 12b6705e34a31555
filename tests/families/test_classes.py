"""vLLM's own classes, without an engine: what the set-up finds out is what was read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_compat

from .classes import CLASSES

TESTS = Path(__file__).parents[1]
TIMEOUT = 420

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow_families,
    pytest.mark.skipif(
        "0.16.0" not in str(vllm_compat.status(workers=False).environment.vllm),
        reason="the configs are those that vLLM 0.16.0 reads",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("classes")
    output = folder / "found.json"
    environment = {
        **os.environ,
        "HF_MODULES_CACHE": str(folder / "modules"),
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "families.classes", str(output)],
        env=environment,
        # Not the top of the repository: ``-m`` would put it before what is installed.
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(output.read_text())
    return result


@pytest.mark.parametrize("name", CLASSES)
def test_convention_is_the_one_that_was_read(name: str, found: dict[str, Any]) -> None:
    expected = CLASSES[name]
    if expected.refused:
        assert expected.refused in found[name].get("refused", found[name])
    else:
        assert found[name] == {"layers": expected.layers, "convention": expected.convention}
