"""What ``doctor`` says of versions: what was tested, and what doesn't fit together."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from .. import tested
from ..environment import Environment, Package
from ..symbols import Sources
from . import machine
from .finding import Finding

__all__ = ["data_preparation", "mismatches", "tested_pair"]

_COMPILED_TOGETHER = ("torch", "torchvision", "torchaudio")
_PREPARATION = "speculators.data_generation.preprocessing"
# speculators reads its data through this one: dataset.set_format(type="torch").
_FORMATTER = "datasets.formatting.torch_formatter"


def tested_pair(environment: Environment) -> Iterator[Finding]:
    """Whether this vLLM was tested with this speculators."""
    vllm, speculators = environment.vllm, environment.speculators
    if vllm is None or speculators is None:
        return
    pair = f"{vllm} with {speculators}"
    here = [c for c in _cells(vllm) if _same(c["speculators"], speculators)]
    if here:
        cell = here[-1]
        if cell["result"] == "works":
            passed = f", {cell['passed']} cases" if "passed" in cell else ""
            yield Finding("ok", "tested", f"{pair} passed the tests ({cell['date']}{passed}).")
        else:
            yield Finding(
                "note", "tested", f"{pair}: {cell['result']} ({cell.get('reason', '')})."
            )
        return
    newest = tested.newest("vllm")
    yield Finding(
        "note",
        "tested",
        f"{pair} has not been tested; all that the patches rely on is there.",
        f"The newest vLLM that was tested is {newest}. Run `vllm-compat verify`."
        if newest
        else "Run `vllm-compat verify`.",
    )


def _cells(vllm: Package) -> list[dict[str, Any]]:
    return [c for c in tested.cells() if _same(c["vllm"], vllm)]


def _same(text: str, package: Package) -> bool:
    release = package.release
    return release is not None and Version(text).base_version == release.base_version


# -- versions that were not made for one another -----------------------------------------------


def mismatches(environment: Environment) -> Iterator[Finding]:
    """Versions that what is installed was not built for. Notes: what an import says counts.

    vLLM settles torch and transformers, and speculators has to take them: its pins are those
    of the one vLLM that it was released with. So advice comes from the versions that this vLLM
    was tested with, else from vLLM's own requirements.
    """
    settled = _settled(environment)
    torch = environment.torch
    if torch is not None and "torch" in settled and not _same(settled["torch"], torch):
        yield Finding(
            "note",
            "torch",
            f"{environment.vllm} was tested with torch {settled['torch']}; {torch.text} is "
            "installed.",
            f"Install torch=={settled['torch']}.",
        )
    vllm = environment.vllm.distribution if environment.vllm else ""
    speculators = environment.speculators.distribution if environment.speculators else ""
    of_vllm = {wanted.name for wanted in _requirements(vllm)}
    for owner in filter(None, (vllm, speculators, "torchvision", "torchaudio")):
        for wanted in _requirements(owner):
            installed = _unmet(wanted)
            if installed is None:
                continue
            name, advice = wanted.name, f"Install {wanted.name}{wanted.specifier}."
            if owner in _COMPILED_TOGETHER:
                right = settled.get("torch", installed.public)
                if wanted.specifier.contains(right, prereleases=True):
                    continue  # it is torch that is the wrong one
                advice = f"Install the {owner} that belongs to torch {right}."
            elif name in settled:
                if name == "torch" or settled[name] == installed.public:
                    continue  # tested like this, or said above
                advice = f"Install {name}=={settled[name]}: {vllm} was tested with that."
            elif owner == speculators and name in of_vllm:
                advice = ""  # vLLM's own requirement counts
            yield Finding(
                "note",
                name,
                f"{owner} {metadata.version(owner)} was made for {name}{wanted.specifier}; "
                f"{installed} is installed.",
                advice,
            )


def _settled(environment: Environment) -> dict[str, str]:
    """The torch and the transformers that this vLLM was tested with, if it was."""
    vllm, speculators = environment.vllm, environment.speculators
    cells = [c for c in _cells(vllm) if c["result"] == "works"] if vllm is not None else []
    if vllm is None or not cells:
        return {}
    same = [c for c in cells if speculators and _same(c["speculators"], speculators)]
    cell = (same or cells)[-1]
    # Tested are builds for CPUs. Others were compiled for a torch that may be another.
    names = ("torch", "transformers") if machine.build_of(vllm) == "cpu" else ("transformers",)
    return {name: Version(cell[name]).public for name in names if name in cell}


def _requirements(distribution: str) -> Iterator[Requirement]:
    """What a distribution asks of the packages in question; any build of a version will do."""
    try:
        texts = metadata.requires(distribution) or [] if distribution else []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        try:
            wanted = Requirement(text)
            if wanted.name not in (*_COMPILED_TOGETHER, "transformers"):
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            # `==2.10.0+cpu` is met by any build of 2.10.0: their ABI is one.
            versions = str(wanted.specifier).split(",")
            yield Requirement(wanted.name + ",".join(v.partition("+")[0] for v in versions))
        except InvalidRequirement:
            continue


def _unmet(wanted: Requirement) -> Version | None:
    """The installed version, if it is not the one that is wanted."""
    try:
        version = Version(metadata.version(wanted.name))
    except (InvalidVersion, metadata.PackageNotFoundError):
        return None
    return None if wanted.specifier.contains(version.public, prereleases=True) else version


# -- speculators' preparation of data ----------------------------------------------------------


def data_preparation(sources: Sources) -> Iterator[Finding]:
    """Whether speculators can read a data set with the `datasets` that is installed.

    datasets up to 4.6 imports ``torchvision.io.VideoReader`` for each value that it turns into
    a tensor, once anything has imported torchvision (``TorchFormatter._tensorize``).
    torchvision has that class up to 0.25.
    """
    if sources.file(_PREPARATION) is None:
        return
    if sources.file("datasets") is None:
        text = "speculators prepares data with datasets, which is not installed."
        yield Finding("problem", "data", text, "Install datasets.")
        return
    if sources.file("torchvision") is None:
        return  # datasets asks first
    lacking = [
        name
        for name in _unguarded_imports(sources.text(_FORMATTER), "torchvision")
        if sources.find(name) is None and sources.file(name.replace(":", ".")) is None
    ]
    if lacking:
        yield Finding(
            "problem",
            "data",
            f"speculators can't prepare data: datasets {_version('datasets')} imports "
            f"{', '.join(n.replace(':', '.') for n in lacking)}, which torchvision "
            f"{_version('torchvision')} doesn't have.",
            _NEWER_DATASETS,
        )


_NEWER_DATASETS = (
    "Install datasets==5.2.0. speculators 0.4 pins datasets<=4.6.0 (an override in uv, or "
    "pip install --no-deps, passes over that); it works with 5.2.0."
)


def _unguarded_imports(text: str, package: str) -> list[str]:
    """What a source imports from a package with nothing around it that catches a failure."""
    found: list[str] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] == package:
                found.extend(f"{node.module}:{alias.name}" for alias in node.names)
            return
        if isinstance(node, ast.Try) and any(map(_catches_import_errors, node.handlers)):
            for child in (*node.handlers, *node.orelse, *node.finalbody):
                visit(child)
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    try:
        visit(ast.parse(text))
    except SyntaxError:
        return []
    return list(dict.fromkeys(found))


def _catches_import_errors(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(caught & {"ImportError", "Exception", "BaseException"})


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "?"
