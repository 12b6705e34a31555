"""Every tensor that this package makes says where it is and of what kind.

A user's ``torch.set_default_device`` or ``set_default_dtype`` would decide otherwise.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted([*ROOT.glob("vllm_compat/**/*.py"), *ROOT.glob("patches/*.py")])

# All that torch's DeviceContext gives a device to (torch/utils/_device.py), as called here.
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full",
    "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range",
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def vague(source: str) -> list[str]:
    """Calls that make a tensor and leave its device or dtype to a default."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKERS:
            names = {keyword.arg for keyword in node.keywords}
            if None not in names and not {"device", "dtype"} <= names:
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_tensors_name_their_device_and_dtype(path: Path) -> None:
    assert vague(path.read_text(encoding="utf-8")) == []


def test_vague_calls_are_found() -> None:
    assert vague("x = torch.empty(3, dtype=torch.uint8)") == [
        "line 1: torch.empty(3, dtype=torch.uint8)"
    ]
    assert vague("torch.zeros(1, device=d)") != []
    assert vague("torch.zeros(1, device=d, dtype=t)") == []
    assert vague("numpy.zeros(1)") == []
