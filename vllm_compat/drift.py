"""Says what a vLLM has moved of what the patches rely on, from its files alone.

Run on a vLLM that nobody has tried yet, it is the work list: each line names the symbol, the
patch that relies on it, and what a user would see. ``python -m vllm_compat drift`` prints it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from .environment import GENERATOR, Environment, detect, require
from .errors import UnsupportedEnvironmentError
from .record import Look, Patch, bound
from .symbols import Sources, Symbol

__all__ = ["Finding", "Kind", "add_arguments", "check", "main", "packages_under", "run"]

Kind = Literal["gone", "parameters", "range", "seam", "import", "environment"]


@dataclass(frozen=True)
class Finding:
    """One thing that is not as a patch knows it.

    Attributes:
        kind: ``gone`` (a symbol is missing), ``parameters`` (a callable lost some),
            ``range`` (probe and version range of a record disagree), ``seam`` (a name that
            a patch replaces is not bound there any more), ``import`` (the generator imports
            it, and it is gone), ``environment`` (no vLLM, or no generator, at all).
        patch: name of the patch, or empty.
        symbol: what it is about; ``module:Name.member``.
        what: one clause that says what is different.
        seen: what a user would see, one clause; may be empty.
    """

    kind: Kind
    patch: str
    symbol: str
    what: str
    seen: str = ""

    def __str__(self) -> str:
        where = f" (patch {self.patch})" if self.patch else ""
        seen = f"; users would see: {self.seen}" if self.seen else ""
        return f"{self.symbol}{where}: {self.what}{seen}"


def check(sources: Sources, patches: Sequence[Patch] | None = None) -> tuple[Finding, ...]:
    """Compares what is installed with what the patches say of it. Imports none of it.

    Args:
        sources: where vLLM, speculators and transformers are read.
        patches: by default all.

    Returns:
        What differs; empty if ``apply()`` would find everything where it expects it.
    """
    if patches is None:
        from .activation import registry

        patches = registry()
    environment = detect(sources)
    try:
        require(environment, sources)
    except UnsupportedEnvironmentError as error:
        return (Finding("environment", "", "", str(error)),)
    return tuple(_findings(environment, Look(environment, sources), patches))


def _findings(
    environment: Environment, look: Look, patches: Sequence[Patch]
) -> Iterator[Finding]:
    for patch in patches:
        needed, expected = patch.needed(look), patch.expected(environment)
        if expected is not None and expected != needed:
            ranges = "; ".join(
                f"{name} {specifier}"
                for name in ("vllm", "speculators", "transformers")
                if (specifier := getattr(patch, name))
            )
            verb = "is needed" if needed else "is not needed"
            yield Finding(
                "range",
                patch.name,
                patch.upstream,
                f"{verb} here, though its record says {ranges}",
            )
        if not needed:
            continue
        for symbol in patch.required_symbols(environment):
            if (finding := _compare(patch, symbol, look.sources)) is not None:
                yield finding
        for seam in patch.replaces:
            if not bound(seam, look.sources):
                yield Finding("seam", patch.name, seam, "is not bound there", patch.why)
    provided = {name for patch in patches if patch.needed(look) for name in patch.provides}
    for name in look.sources.unresolved(GENERATOR, "vllm"):
        if name not in provided:
            seen = "UnsupportedEnvironmentError from apply()"
            yield Finding("import", "", name, "is imported by the generator, and gone", seen)


def _compare(patch: Patch, symbol: Symbol, sources: Sources) -> Finding | None:
    found = sources.find(symbol.path)
    seen = symbol.if_gone or f"UnsupportedEnvironmentError from apply(), for: {patch.why}"
    if found is None:
        return Finding("gone", patch.name, symbol.path, "is gone", seen)
    lost = [name for name in symbol.parameters if not found.accepts(name)]
    if lost:
        what = f"no longer takes {', '.join(lost)}; takes {', '.join(found.parameters) or '-'}"
        return Finding("parameters", patch.name, symbol.path, what, seen)
    return None


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
