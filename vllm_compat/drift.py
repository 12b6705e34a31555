"""Says what a vLLM has moved of what the patches rely on, from its files alone.

Run on a vLLM that nobody has tried yet, it is the work list: each line names the symbol, the
patch that relies on it, and what a user would see. ``python -m vllm_compat drift`` prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .environment import detect
from .inspection import Deviation, inspect, registry
from .record import Patch
from .symbols import Sources

__all__ = ["add_arguments", "check", "main", "packages_under", "run"]


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
        "--path",
        type=Path,
        action="append",
        default=[],
        help="a folder with a vLLM (unpacked wheel, checkout), or a folder of such folders; "
        "may be given more than once. Without it: the vLLM that is installed",
    )
    parser.add_argument(
        "--speculators", type=Path, help="a folder with a speculators package, likewise"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Prints the work list. Exit status: 0 nothing to do, 1 something, 2 nothing to look at."""
    roots: dict[str, Path] = {}
    if arguments.speculators is not None:
        inner = arguments.speculators / "speculators"
        roots["speculators"] = inner if inner.is_dir() else arguments.speculators
    trees: list[dict[str, Path]] = [roots]
    if arguments.path:
        found = [package for path in arguments.path for package in packages_under(path)]
        if not found:
            sys.stderr.write(f"no vLLM under {', '.join(map(str, arguments.path))}\n")
            return 2
        trees = [{**roots, "vllm": package} for package in found]
    results = []
    for tree in trees:
        sources = Sources(tree)
        results.append((detect(sources), check(sources)))
    if arguments.json:
        sys.stdout.write(
            json.dumps(
                [
                    {"environment": str(environment), "findings": [asdict(f) for f in findings]}
                    for environment, findings in results
                ],
                indent=1,
            )
            + "\n"
        )
    else:
        for environment, findings in results:
            subject = ", ".join(
                str(p) for p in (environment.vllm, environment.speculators) if p is not None
            )
            count = len(findings)
            verdict = "nothing has moved" if not count else f"{count} to look at"
            sys.stdout.write(f"{subject or 'nothing installed'}: {verdict}\n")
            for finding in findings:
                sys.stdout.write(f"  {finding.kind:<11} {finding}\n")
    return 1 if any(findings for _, findings in results) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command by itself: ``python -m vllm_compat.drift``."""
    parser = argparse.ArgumentParser(prog="vllm-compat drift", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
