"""The wheel has all of it: built, unpacked, and run from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_asks_for_nothing_that_is_the_users_own(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        lines = archive.read(name).decode().splitlines()
    needs = [line for line in lines if line.startswith("Requires-Dist:")]
    always = {line.split()[1].split(">")[0] for line in needs if "extra ==" not in line}
    assert always <= {"packaging", "wrapt"}


@pytest.mark.engine
def test_runs_from_the_wheel(
    wheel: Path, one_prompt: Run, checkpoint: Path, tmp_path: Path
) -> None:
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    path = os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])
    done = one_prompt(checkpoint, PYTHONPATH=path)
    assert f"package: {place}" in done.stdout, done.stdout + done.stderr[-2000:]
    assert "\nOK\n" in done.stdout, done.stderr[-3000:]
