"""The picture of the errors."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from vllm_compat.checks.plot import check_path, write_plot
from vllm_compat.checks.rows import Comparison, compare


@pytest.fixture
def comparison() -> Comparison:
    torch.manual_seed(0)
    want = [[torch.randn(n, 32) for _ in range(2)] for n in (5, 17)]
    got = [[s + 0.01 * torch.randn_like(s) for s in layers] for layers in want]
    got[1][1][3:6] = got[1][1][4:7].clone()
    return compare(got, want, [0, 7])


def test_the_page_needs_nothing_else(comparison: Comparison, tmp_path: Path) -> None:
    page = tmp_path / "errors.html"
    write_plot(comparison, page, "a <model>")
    text = page.read_text(encoding="utf-8")
    assert "a &lt;model&gt;" in text
    assert "<model>" not in text
    assert not re.search(r"<script|<link|src=|url\(|@import|https?://", text)
    assert "shifted by +1" in text
    (svg,) = re.findall(r"<svg.*</svg>", text)
    drawing = ElementTree.fromstring(svg)  # well-formed
    lines = drawing.findall("polyline")
    assert len(lines) == 2
    assert [len(line.attrib["points"].split()) for line in lines] == [17, 17]
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 860
            assert 0 <= y <= 420


def test_errors_of_zero_can_be_drawn(tmp_path: Path) -> None:
    want = [[torch.ones(1, 4)]]
    write_plot(compare(want, want, [0]), tmp_path / "errors.html", "zero")
    assert "<polyline" in (tmp_path / "errors.html").read_text()


def test_png(comparison: Comparison, tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ValueError, match="needs matplotlib"):
            write_plot(comparison, tmp_path / "errors.png", "")
    else:
        write_plot(comparison, tmp_path / "errors.png", "")
        assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused() -> None:
    with pytest.raises(ValueError, match=r"is a \.html or a \.png"):
        check_path(Path("errors.pdf"))
