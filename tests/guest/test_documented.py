"""The public API says of itself what a user has to know."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import vllm_compat
from vllm_compat import patches, worker_environment
from vllm_compat.inspection import registry
from vllm_compat.settings import Settings

DOCS = Path(__file__).parents[2] / "docs" / "guest.md"


def public() -> dict[str, Any]:
    found = {name: getattr(vllm_compat, name) for name in vllm_compat.__all__}
    for name, value in list(found.items()):
        if inspect.isclass(value):
            found |= {
                f"{name}.{attribute}": member
                for attribute, member in vars(value).items()
                if not attribute.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property))
            }
    return found


@pytest.mark.parametrize("name", public())
def test_has_a_docstring(name: str) -> None:
    doc = inspect.getdoc(public()[name])
    assert doc
    assert not doc.startswith(f"{name.split('.')[-1]}(")  # what dataclasses write by themselves


@pytest.mark.parametrize(
    "name", [n for n, v in public().items() if inspect.isfunction(inspect.unwrap(v))]
)
def test_every_parameter_is_explained(name: str) -> None:
    function = inspect.unwrap(public()[name])
    doc = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    for parameter in parameters:
        assert re.search(rf"^    {parameter}: ", doc, re.MULTILINE), parameter
    explained = re.search(r"^(Returns|Yields):|^[A-Z]", doc, re.MULTILINE)
    assert explained


@pytest.mark.parametrize(
    "name", [n for n, v in public().items() if dataclasses.is_dataclass(v)]
)
def test_every_field_is_explained(name: str) -> None:
    doc = inspect.getdoc(public()[name]) or ""
    for field in dataclasses.fields(public()[name]):
        assert re.search(rf"^    {field.name}: ", doc, re.MULTILINE), field.name


def test_everything_is_annotated() -> None:
    for name, value in public().items():
        function = inspect.unwrap(value)
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            assert signature.return_annotation is not signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.name == "self" or parameter.annotation, name


def sources() -> list[Path]:
    folders = [Path(str(p.__file__)).parent for p in (vllm_compat, patches)]
    return [file for folder in folders for file in folder.rglob("*.py")]


def test_the_table_of_our_variables_is_that_of_the_settings() -> None:
    text = DOCS.read_text()
    documented = re.findall(r"^\| `(VLLM_COMPAT_[A-Z_]+)` \| (.*) \|$", text, re.MULTILINE)
    assert documented == [(v.name, v.meaning) for v in Settings.variables().values()]


def variables_read(file: Path) -> set[str]:
    """Names in ``os.environ[...]``, ``os.environ.get(...)``, ``... in os.environ``."""
    tree = ast.parse(file.read_text())
    constants: dict[str, ast.expr] = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    named: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            named.append(node.slice)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            named.append(node.args[0])
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            named.append(node.left)
    values = [constants.get(ast.unparse(name), name) for name in named]
    return {v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)}


READERS = ("os.environ.get", "os.environ.pop", "os.getenv")


def test_every_variable_that_is_read_is_in_the_documentation() -> None:
    """Other libraries' too. Ours are read by the settings, and nowhere else a second time."""
    read = set().union(*map(variables_read, sources()))
    assert {"VLLM_WORKER_MULTIPROC_METHOD", "HF_HUB_OFFLINE"} <= read
    assert {name for name in read if name.startswith("VLLM_COMPAT_")} == set()
    text = DOCS.read_text()
    assert [name for name in sorted(read) if f"`{name}`" not in text] == []


def test_every_seam_is_in_the_documentation() -> None:
    text = DOCS.read_text()
    seams = {seam.partition(":")[2] for patch in registry() for seam in patch.replaces}
    assert [name for name in sorted(seams) if f"`{name}`" not in text] == []


def test_every_variable_that_is_set_is_in_the_documentation() -> None:
    text = DOCS.read_text()
    set_ = ("_START_METHOD", "_BIND", "_PORT", "_LOCAL_WORLD_SIZE")
    names = [getattr(worker_environment, name) for name in set_]
    for name in [*names, "PYTORCH_NVML_BASED_CUDA_CHECK"]:
        assert f"`{name}`" in text
