"""Records, files and documents say the same."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from vllm_compat.patches import REGISTRY

from vllm_compat.environment import GENERATOR
from vllm_compat.features import Features
from vllm_compat.record import Patch
from vllm_compat.symbols import Sources

ROOT = Path(__file__).resolve().parents[2]
NAMES = [patch.name for patch in REGISTRY]


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("patch", REGISTRY, ids=NAMES)
def test_record_is_complete(patch: Patch) -> None:
    assert re.fullmatch(r"[a-z0-9.]+(-[a-z0-9.]+)*", patch.name)
    assert patch.why
    assert patch.upstream
    assert patch.delete_when
    assert patch.replaces or patch.around_import or patch.feature
    for specifier in (patch.vllm, patch.speculators, patch.transformers):
        SpecifierSet(specifier)


def test_each_feature_has_one_record() -> None:
    of_records = [patch.feature for patch in REGISTRY if patch.feature]
    assert sorted(of_records) == sorted(field.name for field in fields(Features))


def test_no_two_records_replace_one_name() -> None:
    """What an adapter does differently on some release is a feature, not a second adapter."""
    names = [seam for patch in REGISTRY for seam in patch.replaces]
    assert sorted(set(names)) == sorted(names)


def test_every_module_is_in_the_registry() -> None:
    import vllm_compat.patches

    folder = Path(inspect.getfile(vllm_compat.patches)).parent
    modules = {f.stem for f in folder.glob("*.py")} - {"__init__"}
    source = inspect.getsource(vllm_compat.patches)
    assert {m for m in modules if f"*{m}.PATCHES" not in source} == set()


@pytest.mark.parametrize("patch", REGISTRY, ids=NAMES)
def test_seams_are_speculators_own(patch: Patch) -> None:
    """vLLM's classes stay as they are for everybody else."""
    for seam in patch.replaces:
        assert seam.startswith("speculators.data_generation.")
        # Outside of the generator's module nothing knows which generator it works for.
        assert seam.startswith(f"{GENERATOR}:") or seam in patch.anywhere
    assert set(patch.anywhere) <= set(patch.replaces)


def test_seams_that_are_on_exist() -> None:
    import vllm_compat

    sources = Sources()
    for entry in vllm_compat.status(workers=False).entries:
        if entry.state != "not needed":
            for seam in entry.patch.replaces:
                module, _, path = seam.partition(":")
                for name in path.split("."):
                    assert re.search(rf"\b{name}\b", sources.text(module)), seam


def test_page_is_made_from_the_records() -> None:
    script = ROOT / "scripts" / "patch_table.py"
    if not script.is_file():
        pytest.skip("not in a checkout")
    spec = importlib.util.spec_from_file_location("patch_table", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text("utf-8") == module.page(), "run scripts/patch_table.py"
