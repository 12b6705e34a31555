"""What users are told to install is what uv makes of it: resolved, not installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from packaging.version import Version

from .test_ci_cells import ROOT, uv

PAGE = ROOT / "docs" / "how-to" / "training-environment.md"
RECIPE = re.compile(
    r"^printf '(?P<overrides>.*)' > overrides\.txt\n"
    r"uv pip install --override overrides\.txt (?P<wanted>.*) vllm-compat$",
    re.MULTILINE,
)


def resolved(wanted: str, overrides: str, folder: Path) -> dict[str, Version]:
    (folder / "wanted.in").write_text(wanted.replace(" ", "\n") + "\n")
    (folder / "overrides.txt").write_text(overrides.replace(r"\n", "\n"))
    command: list[str | Path] = [
        uv(),
        "pip",
        "compile",
        "--quiet",
        "--no-annotate",
        "--no-header",
    ]
    command += ["--python-version=3.11", "--override=overrides.txt", "wanted.in"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pins = (line.split("==") for line in done.stdout.splitlines() if "==" in line)
    return {name: Version(version.split(" ")[0]) for name, version in pins}


def test_speculators_04_on_the_newest_vllm_can_prepare_data(tmp_path: Path) -> None:
    recipe = RECIPE.search(PAGE.read_text("utf-8"))
    assert recipe is not None, f"{PAGE.name} has no recipe with overrides"
    found = resolved(recipe["wanted"], recipe["overrides"], tmp_path)
    for pin in recipe["wanted"].split():
        name, version = pin.split("==")
        assert found[name] == Version(version)
    # See constraints/compile.py: with an older one, preprocessing ends in an ImportError.
    assert found["torchvision"] >= Version("0.26")
    assert found["datasets"] >= Version("4.8.4")
