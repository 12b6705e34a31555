"""The second of the README's two commands: every check that CI runs, from nothing.

    python3 scripts/test.py [PYTEST OPTIONS]

Sets up the environment if it isn't there. Then ruff; the distributions are built, and
mypy checks the wheel's content, which is laid out as users get it (patches/ is
vllm_compat.patches there); the documentation is built; then pytest, with the tests that
start real engines, in two processes at a time. The options go to pytest: ``-m "not engine"``
leaves out the engines, ``-k NAME`` picks, ``-n 0`` runs one test after the other.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from environment import ROOT, child_environment, ensure, guarded, say

DEFAULT_MARKERS = "not slow and not slow_families"
PARALLEL = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def step(name: str, command: list[str | Path], cwd: Path = ROOT, quiet: bool = False) -> int:
    """Run a command and return its exit status; its output, if quiet, only when it fails."""
    words = [str(word) for word in command]
    say(f"== {name}: {shlex.join(words)}")
    # Tests that need more say so themselves; half of the memory, vLLM's default, is no use.
    env = child_environment()
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # vLLM's workers wait by spinning; those that nobody asks anything leave the core to others.
    env.setdefault("VLLM_SLEEP_WHEN_IDLE", "1")
    if not quiet:
        return subprocess.run(words, env=env, cwd=cwd, check=False).returncode
    done = subprocess.run(
        words, env=env, cwd=cwd, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        say(done.stdout)
    return done.returncode


def check_types(python: Path, scratch: Path) -> int:
    """Build sdist and wheel as a release would, and check the types of what is in the wheel."""
    built = step(
        "build",
        [python, "-m", "build", "--no-isolation", "--outdir", scratch / "dist", ROOT],
        quiet=True,
    )
    if built:
        return built
    (wheel,) = (scratch / "dist").glob("*.whl")
    unpacked = scratch / "wheel"
    zipfile.ZipFile(wheel).extractall(unpacked)
    # From there, since mypy looks for a package in the current folder first.
    return step(
        "mypy",
        [python, "-m", "mypy", "--config-file", ROOT / "pyproject.toml",
         "--cache-dir", ROOT / ".mypy_cache"],
        cwd=unpacked,
    )  # fmt: skip


def main() -> int:
    python = ensure("demo", "test")
    options = sys.argv[1:]
    results: dict[str, int] = {}
    results["ruff"] = step("ruff", [python, "-m", "ruff", "check", "."])
    results["format"] = step("format", [python, "-m", "ruff", "format", "--check", "."])
    with tempfile.TemporaryDirectory(prefix="vllm-compat-") as scratch:
        results["build and mypy"] = check_types(python, Path(scratch))
        results["docs"] = step(
            "docs",
            [python, "-m", "mkdocs", "build", "--strict", "--site-dir", Path(scratch) / "site"],
            quiet=True,
        )
    if not any(option.startswith("-m") for option in options):
        options = ["-m", DEFAULT_MARKERS, *options]
    if not any(option.startswith(("-n", "--numprocesses")) for option in options):
        # Most of the time goes into starting engines, on one core each. The tests of a file
        # share theirs.
        options = [*PARALLEL, *options]
    # Exit status 5, no test ran, is a failure like any other.
    results["pytest"] = step("pytest", [python, "-m", "pytest", *options])
    failed = [f"{name} (exit status {code})" for name, code in results.items() if code]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
