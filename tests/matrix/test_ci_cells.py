"""The part of the version matrix that every run of the tests sees.

The oldest vLLM, the one of the documentation and the newest, with both generations of the
generator; each in an environment of its own, by the command that runs the whole matrix. The
cell of 0.16.0 and speculators 0.3.0 isn't here: it is the environment that the tests run in.

The first run downloads two more releases of torch (several GB).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "constraints"))
from cells import cells  # noqa: E402

NEWEST = cells()[-1].vllm
# Without dependence on what happens to be installed beside uv.
NOX = "nox==2026.10.20"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (3, 11) <= sys.version_info[:2] <= (3, 12),
        reason="the newest vLLM needs Python 3.11 or 3.12; a run of the tests on one has these",
    ),
]


def uv() -> Path:
    """uv from PATH, or the one that the set-up of this checkout has made."""
    found = shutil.which("uv") or ROOT / ".venv-uv" / "bin" / "uv"
    assert Path(found).exists(), "uv is needed: pip install uv"
    return Path(found)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("vllm", "speculators"),
    [
        ("0.11.0.post2", "0.3.0"),
        ("0.16.0", "0.4.0.1"),
        (NEWEST, "0.3.0"),
        (NEWEST, "0.4.0.1"),
    ],
)
def test_cell(vllm: str, speculators: str, tmp_path: Path) -> None:
    record = tmp_path / "tested.json"
    session = f"matrix({vllm}-{speculators})"
    command: list[str | Path] = [uv(), "tool", "run", "--from", NOX, "nox", "-s", session]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **environment,
            "PATH": f"{uv().parent}{os.pathsep}{os.environ['PATH']}",
            "VLLM_COMPAT_MATRIX_RECORD": str(record),
            "VLLM_COMPAT_MATRIX_PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stdout[-6000:]
    (cell,) = json.loads(record.read_text())["cells"]
    assert (cell["vllm"], cell["speculators"]) == (vllm, speculators)
    assert cell["result"] == "works"
    assert cell["passed"] >= 40
    assert cell["extract"] == "passed"
