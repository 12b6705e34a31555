"""docs/families.md, the results it is made from and the registry belong together."""

from __future__ import annotations

import pytest
from packaging.specifiers import SpecifierSet

from .cpu_workarounds import WORKAROUNDS
from .registry import BY_NAME, FAMILIES
from .report import PAGE, read, render


def test_page_is_made_from_the_results() -> None:
    assert PAGE.read_text() == render(read()), "run: python -m tests.families.report"


def test_every_family_has_a_result() -> None:
    """A family added to the registry is measured before it is in the page, and stays right."""
    wanted = {(f.name, dtype, 1) for f in FAMILIES for dtype in f.dtypes}
    wanted |= {(f.name, f.dtypes[0], 2) for f in FAMILIES if f.tensor_parallel}
    results = read()
    assert {(r["family"], r["checkpoint"], r["ranks"]) for r in results} == wanted
    for result in results:
        family = BY_NAME[result["family"]]
        if family.vllm:
            assert result["versions"]["vllm"] in SpecifierSet(family.vllm)
        if family.refused:
            assert family.refused in result["refused"]
            continue
        assert result["vllm_class"] == family.vllm_class
        assert result["largest_error"] <= family.allowed(result["dtype"])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_record_is_complete(family: object) -> None:
    from .registry import Family

    assert isinstance(family, Family)
    assert set(family.workarounds) <= set(WORKAROUNDS)
    assert family.model or family.writer == "minimax_m2"
    assert family.dtypes
