"""Says what a vLLM has moved of what the patches rely on, from its files alone.

Run on a vLLM that nobody has tried yet, it is the work list: each line names the symbol, the
patch that relies on it, and what a user would see. ``vllm-compat drift 0.33.0`` downloads the
wheel of that release and installs nothing; without a version, the installed vLLM is read.

Exit status: 0 nothing has moved; 1 something has; 2 there was nothing to look at.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import tested
from .environment import Environment, detect
from .errors import UnsupportedEnvironmentError
from .inspection import Deviation, inspect, registry
from .record import Patch
from .symbols import Sources
from .wheels import is_version, unpacked

__all__ = ["Drift", "add_arguments", "check", "main", "packages_under", "run"]


@dataclass(frozen=True)
class Drift:
    """What was found for one pair of releases.

    Attributes:
        environment: the pair.
        deviations: what differs from what the patches say.
    """

    environment: Environment
    deviations: tuple[Deviation, ...]

    @property
    def cell(self) -> dict[str, str] | None:
        """The cell of the matrix, ``vllm`` and ``speculators``; None if one is missing."""
        vllm, speculators = self.environment.vllm, self.environment.speculators
        if vllm is None or speculators is None or vllm.release is None:
            return None
        return {"vllm": vllm.release.public, "speculators": str(speculators.release)}

    @property
    def result(self) -> str:
        """What the matrix says of the cell; empty if it has none."""
        for known in tested.cells():
            if self.cell == {name: known[name] for name in ("vllm", "speculators")}:
                return str(known["result"])
        return ""

    @property
    def verdict(self) -> str:
        """``moved``, ``tested``, or ``untested``: nothing has moved, and nobody has run it."""
        if self.deviations:
            return "moved"
        return "tested" if self.result == "works" else "untested"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        cell = self.cell
        return {
            "environment": str(self.environment),
            "verdict": self.verdict,
            "cell": cell,
            "add_cell": cell is not None and not self.result,
            "findings": [asdict(deviation) for deviation in self.deviations],
        }

    def __str__(self) -> str:
        pair = (self.environment.vllm, self.environment.speculators)
        subject = ", ".join(str(p) for p in pair if p is not None) or "nothing installed"
        count = len(self.deviations)
        said = {
            "moved": f"{count} to look at",
            "tested": "nothing has moved",
            "untested": "nothing has moved; the matrix has not passed on it",
        }[self.verdict]
        return "\n".join(
            [f"{subject}: {said}", *(f"  {d.kind:<11} {d}" for d in self.deviations)]
        )


def check(sources: Sources, patches: Sequence[Patch] | None = None) -> tuple[Deviation, ...]:
    """Compares what is installed with what the patches say of it. Imports none of it.

    Args:
        sources: where vLLM, speculators and transformers are read.
        patches: by default all.

    Returns:
        What differs; empty if ``apply()`` would find everything where it expects it.
    """
    return inspect(sources, registry() if patches is None else patches).deviations


def packages_under(path: Path) -> list[Path]:
    """Folders of vLLM packages: ``path`` itself, ``path/vllm``, or ``path/*/vllm``."""
    if (path / "__init__.py").is_file() and (path / "v1").is_dir():
        return [path]
    if (path / "vllm" / "__init__.py").is_file():
        return [path / "vllm"]
    return sorted(p.parent for p in path.glob("*/vllm/__init__.py"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``drift``."""
    parser.add_argument(
        "version",
        nargs="*",
        help="a release of vLLM, whose wheel is downloaded and not installed",
    )
    parser.add_argument(
        "--path",
        type=Path,
        action="append",
        default=[],
        help="a folder with a vLLM (unpacked wheel, checkout), or a folder of such folders; "
        "may be given more than once. Without it: the vLLM that is installed",
    )
    parser.add_argument(
        "--speculators",
        action="append",
        default=[],
        help="a release of speculators, whose wheel is downloaded, or a folder with the "
        "package; may be given more than once. Without it: with a version of vLLM, each "
        "release that the matrix has; else the one that is installed",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Prints the work list, and returns the exit status."""
    try:
        with _trees(arguments) as trees:
            found = []
            for tree in trees:
                sources = Sources(tree)
                found.append(Drift(detect(sources), check(sources)))
    except UnsupportedEnvironmentError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.json:
        sys.stdout.write(json.dumps([drift.as_json() for drift in found], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{drift}\n" for drift in found)
    return 1 if any(drift.deviations for drift in found) else 0


@contextmanager
def _trees(arguments: argparse.Namespace) -> Iterator[list[dict[str, Path]]]:
    """Package name to folder, for each pair that is to be looked at."""
    with tempfile.TemporaryDirectory(prefix="vllm-compat-") as scratch:
        folder = Path(scratch)
        vllms = [package for path in arguments.path for package in packages_under(path)]
        if arguments.path and not vllms:
            raise UnsupportedEnvironmentError(
                f"no vLLM under {', '.join(map(str, arguments.path))}"
            )
        vllms += [unpacked("vllm", version, folder) for version in arguments.version]
        wanted = arguments.speculators
        if arguments.version and not wanted:
            wanted = sorted({cell["speculators"] for cell in tested.cells()})
        speculators = [
            unpacked("speculators", text, folder) if is_version(text) else _package(Path(text))
            for text in wanted
        ]
        yield [
            {**vllm, **other}
            for vllm in ([{"vllm": path} for path in vllms] or [{}])
            for other in ([{"speculators": path} for path in speculators] or [{}])
        ]


def _package(path: Path) -> Path:
    inner = path / "speculators"
    return inner if inner.is_dir() else path


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself: ``python -m vllm_compat.drift``."""
    parser = argparse.ArgumentParser(prog="vllm-compat drift", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
