"""The version matrix: vLLM releases x speculators releases, an environment for each cell.

    nox -s "matrix(0.16.0-0.3.0)"        # one cell
    nox -s matrix -t ci                  # the cells that CI runs
    nox -s matrix -t newest              # the newest vLLM, every speculators
    nox -s matrix -t minors              # newest patch release of every vLLM minor
    nox -s matrix                        # all of it
    nox -s matrix -t minors -- -k data_to_files  # from data to files, in minutes
    nox -l                               # names and tags

A cell installs its pins (`constraints/cells.py` prints them), builds and installs this
package's wheel, and runs `tests/conformance/`: the generator, and the way from conversations to
files. Its outcome goes into `vllm_compat/data/tested.json`, from which `status()`, the README
and the documentation take what has been tested. A part of the suite (`-k`) only adds to what is
known of a cell that works: that the way to files was run, and when. The environment is removed
afterwards. uv links its files from a cache, so that a cell costs seconds and no space.

Needs uv on PATH, Python 3.11 or 3.12, and the C library that the cell's vLLM was built for;
what can't run here is written down as such, with the reason.
"""

from __future__ import annotations

import datetime
import glob
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nox

sys.path += [str(Path(__file__).parent / folder) for folder in ("constraints", "scripts")]
import evidence
from cells import cells, pins, requirements

nox.options.sessions = []
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
TESTED = Path(
    os.environ.get("VLLM_COMPAT_MATRIX_RECORD", ROOT / "vllm_compat" / "data" / "tested.json")
)
# One path for all cells: byte code that one cell compiled serves the next, where the file is
# the same. The cells of one checkout therefore run one after the other.
WORK = Path(os.environ.get("VLLM_COMPAT_MATRIX_DIR", ROOT / ".nox"))
# The pins are made for 3.11 and serve 3.12 as well. By default the Python that nox runs on.
PYTHON = os.environ.get("VLLM_COMPAT_MATRIX_PYTHON", sys.executable)

CI = {("0.11.0.post2", "0.3.0"), ("0.16.0", "0.3.0"), ("0.16.0", "0.4.0.1")}
# The tests run with speculators 0.3.0. What is about the generator of 0.4 alone runs here.
MORE = {
    ("0.16.0", "0.4.0.1"): (
        "tests/rows/test_upstream_faults.py",
        "tests/guest/test_restore.py",
        "tests/patching/test_device_name.py",
    )
}


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _parameters() -> list[Any]:
    known = cells()
    newest = known[-1].vllm
    last_of_minor = {_release(vllm)[:2]: vllm for vllm, _ in known}
    parameters = []
    # The newest first: what breaks there is what users meet next.
    for vllm, speculators in reversed(known):
        tags = []
        if vllm == newest:
            tags.append("newest")
        # 0.16.0 is the release that the documentation runs on.
        if vllm in (last_of_minor[_release(vllm)[:2]], "0.16.0"):
            tags.append("minors")
        if (vllm, speculators) in CI or (vllm == newest and speculators != "0.4.0"):
            tags.append("ci")
        parameters.append(nox.param(vllm, speculators, id=f"{vllm}-{speculators}", tags=tags))
    return parameters


@nox.session
@nox.parametrize(["vllm", "speculators"], _parameters())
def matrix(session: nox.Session, vllm: str, speculators: str) -> None:
    """One cell: install its pins, run the conformance suite, write down what came out."""
    environment, report = WORK / "cell", WORK / "report.json"
    python = environment / "bin" / "python"
    shutil.rmtree(environment, ignore_errors=True)
    report.unlink(missing_ok=True)
    variables: dict[str, str | None] = {
        "UV_LINK_MODE": "hardlink",
        "PYTHONPYCACHEPREFIX": str(WORK / "bytecode"),
        # Without byte code on disk each worker compiles vLLM again.
        "PYTHONDONTWRITEBYTECODE": None,
        "PYTHONPATH": None,
    }

    def run(*command: str | Path, **options: Any) -> Any:
        env = {**variables, **options.pop("env", {})}
        return session.run(*map(str, command), external=True, env=env, **options)

    try:
        run(
            "uv",
            "venv",
            "--quiet",
            "--no-config",
            "--no-python-downloads",
            f"--python={PYTHON}",
            environment,
        )
        install = ("uv", "pip", "install", "--quiet", f"--python={python}", "--no-deps")
        pinned = WORK / "pins.txt"
        pinned.write_text(requirements(pins(vllm, speculators)))
        run(*install, "-r", pinned)
        for old in WORK.glob("*.whl"):
            old.unlink()
        run("uv", "build", "--quiet", "--wheel", f"--out-dir={WORK}", ROOT)
        run(*install, next(WORK.glob("*.whl")))
        obstacle, preload = _obstacle(python, vllm)
        if obstacle:
            _record(
                session, vllm, speculators, {"result": "can't run here", "reason": obstacle}
            )
            session.skip(obstacle)
        run(
            environment / "bin" / "pytest", ROOT / "tests" / "conformance",
            # The suite stands alone: a cell has none of what other tests need.
            "--confcutdir", ROOT / "tests" / "conformance", "-p", "no:cacheprovider",
            f"--conformance-report={report}", "--timeout=300", *session.posargs,
            success_codes=range(256), silent=False,
            env={"LD_PRELOAD": ":".join(preload)} if preload else {},
        )  # fmt: skip
        found = json.loads(report.read_text()) if report.exists() else None
        outcome = evidence.outcome(found)
        part = bool(found and found["deselected"])
        _record(session, vllm, speculators, outcome, part=part)
        if outcome["result"] == "fails":
            session.error(outcome["reason"])
        if more := MORE.get((vllm, speculators)):
            run(environment / "bin" / "pytest", *(ROOT / file for file in more),
                "-p", "no:cacheprovider")  # fmt: skip
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def _obstacle(python: Path, vllm: str) -> tuple[str, list[str]]:
    """Why this machine can't run that vLLM at all, and what has to be preloaded for it."""
    kernels = subprocess.run(
        [python, "-c", "import torch, vllm._C"], capture_output=True, text=True, check=False
    )
    if kernels.returncode and re.search(r"GLIBC_|CXXABI_|GLIBCXX_", kernels.stderr):
        return kernels.stderr.strip().splitlines()[-1].removeprefix("ImportError: "), []
    if _release(vllm)[:2] != (0, 18):
        return "", []
    # vLLM 0.18's CPU worker refuses to start without these two (0.19 only warns).
    allocator = sorted(glob.glob("/usr/lib/*/libtcmalloc*.so.*"))
    openmp = sorted(python.parent.parent.glob("lib/libiomp5.so"))
    if not allocator:
        return "vLLM 0.18 on CPU needs libtcmalloc (Debian: libtcmalloc-minimal4)", []
    if not openmp:
        return "vLLM 0.18 on CPU needs libiomp5 (PyPI: intel-openmp)", []
    return "", [allocator[0], str(openmp[0])]


def _record(
    session: nox.Session,
    vllm: str,
    speculators: str,
    outcome: dict[str, Any],
    *,
    part: bool = False,
) -> None:
    """Puts one cell into tested.json."""
    known = json.loads(TESTED.read_text())["cells"] if TESTED.exists() else []
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    new = {"vllm": vllm, "speculators": speculators, "date": today, **outcome}
    TESTED.parent.mkdir(exist_ok=True)
    cells = evidence.known_with(known, new, part=part)
    TESTED.write_text(json.dumps({"cells": cells}, indent=1) + "\n")
    session.log(f"vLLM {vllm}, speculators {speculators}: {outcome}")
    if outcome["result"] != "works":
        sys.stderr.write(f"{vllm}-{speculators}: {outcome['result']}: {outcome['reason']}\n")
