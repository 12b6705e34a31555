"""No module is imported late because an import at the top would go round in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from vllm_compat import inspection, patches

PACKAGE = Path(str(inspection.__file__)).parent
PATCHES = Path(str(patches.__file__)).parent


def modules() -> dict[str, Path]:
    found = {}
    for name, folder in (("vllm_compat", PACKAGE), ("vllm_compat.patches", PATCHES)):
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            dotted = ".".join((name, *parts)).removesuffix(".__init__")
            found[dotted] = file
    return found


def imported(name: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that one imports when it is imported."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            home = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                yield inner if inner in known else home


def test_the_patches_need_neither_the_verbs_nor_the_registry() -> None:
    """`registry()` imports them late for the sake of time alone."""
    known = modules()
    edges = {name: set(imported(name, file, known)) for name, file in known.items()}
    assert "vllm_compat.inspection" in edges["vllm_compat.decision"]
    assert "vllm_compat.session" in edges["vllm_compat.patches.executor"]
    reached: set[str] = set()
    waiting = {name for name in known if name.startswith("vllm_compat.patches")}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= edges.get(name, set()) - reached
    assert "vllm_compat.state" in reached
    verbs = {f"vllm_compat.{name}" for name in ("inspection", "decision", "activation")}
    assert reached & {*verbs, "vllm_compat"} == set()
