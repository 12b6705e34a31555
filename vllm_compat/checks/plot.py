"""Errors by position as a picture: an HTML page with nothing to load, or a PNG."""

from __future__ import annotations

import html
import importlib.util
import math
from pathlib import Path

from .rows import Comparison

__all__ = ["write_plot"]

# Okabe and Ito's colours: told apart by colour-blind readers too.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 130, 20, 50
_LEAST = 1e-5  # errors below that are drawn there; the axis is logarithmic

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}td,th{padding:.15em .8em;text-align:right}
th{border-bottom:1px solid #888}svg{width:100%;height:auto}text{font:12px system-ui;fill:#444}
.wrong{color:#b00020}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}text{fill:#bbb}}
"""


def write_plot(comparison: Comparison, path: Path, title: str) -> None:
    """Writes the picture.

    Args:
        comparison: what to draw.
        path: ``.html`` or ``.png`` (which needs matplotlib).
        title: in one line.

    Raises:
        ValueError: another suffix, or no matplotlib.
    """
    check_path(path)
    if path.suffix.lower() == ".png":
        _write_png(comparison, path, title)
    else:
        path.write_text(_page(comparison, title), encoding="utf-8")


def check_path(path: Path) -> None:
    """Raises ValueError if :func:`write_plot` couldn't write that."""
    suffix = path.suffix.lower()
    if suffix == ".png":
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("a PNG needs matplotlib; name a .html file to do without.")
    elif suffix != ".html":
        raise ValueError(f"{path.name}: a plot is a .html or a .png file.")


def series(comparison: Comparison) -> list[tuple[str, list[float], list[float]]]:
    """For each layer its name, and for each position the mean and the largest error."""
    longest = max(comparison.lengths)
    found = []
    for layer in comparison.layers:
        means, worst = [], []
        for position in range(longest):
            column = [float(e[position]) for e in layer.errors if position < len(e)]
            means.append(sum(column) / len(column))
            worst.append(max(column))
        found.append((f"layer {layer.layer}", means, worst))
    return found


def _page(comparison: Comparison, title: str) -> str:
    rows = "".join(
        f"<tr><td>{layer.layer}</td><td>{100 * layer.mean:.2f} %</td>"
        f"<td>{100 * layer.median:.2f} %</td><td>{100 * layer.worst:.2f} %</td>"
        f"<td>prompt {layer.worst_at[0]}, position {layer.worst_at[1]}</td></tr>"
        for layer in comparison.layers
    )
    wrong = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in comparison.wrong)
    verdict = f"<ul class=wrong>{wrong}</ul>" if wrong else "<p>Every row is right.</p>"
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{_svg(comparison)}"
        "<p>Relative error of a row by its position: the mean of all prompts (line) and the "
        "largest (dots). The dashed line is the limit for a row.</p>"
        "<table><tr><th>layer<th>mean<th>median<th>worst row<th>where</tr>"
        f"{rows}</table>{verdict}</html>\n"
    )


def _svg(comparison: Comparison) -> str:
    drawn = series(comparison)
    longest = max(comparison.lengths)
    largest = max([comparison.limits.row, *(w for _, _, ws in drawn for w in ws if w < 1e6)])
    smallest = min((m for _, ms, _ in drawn for m in ms if m > _LEAST), default=_LEAST)
    low, high = math.floor(math.log10(smallest)), math.ceil(math.log10(largest * 1.05))

    def x(position: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * position / max(longest - 1, 1)

    def y(error: float) -> float:
        value = math.log10(error) if _LEAST < error < 10**high else (low if error < 1 else high)
        share = (max(value, low) - low) / max(high - low, 1)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="errors">']
    for exponent in range(low, high + 1):
        line = y(10.0**exponent)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{line:.1f}" y2="{line:.1f}" '
            f'stroke="#8884"/><text x="{_LEFT - 8}" y="{line + 4:.1f}" text-anchor="end">'
            f"{10.0 ** (exponent + 2):g} %</text>"
        )
    for position in sorted({round(i * (longest - 1) / 5) for i in range(6)}):
        parts.append(
            f'<text x="{x(position):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">'
            f"{position}</text>"
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">position</text>'
    )
    limit = y(comparison.limits.row)
    parts.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{limit:.1f}" y2="{limit:.1f}" '
        'stroke="#b00020" stroke-dasharray="6 4"/>'
    )
    for index, (name, means, worst) in enumerate(drawn):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x(p):.1f},{y(m):.1f}" for p, m in enumerate(means))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}"><title>{name}</title>'
            "</polyline>"
        )
        parts += [
            f'<circle cx="{x(p):.1f}" cy="{y(w):.1f}" r="1.6" fill="{colour}"><title>{name}, '
            f"position {p}: {100 * w:.2f} %</title></circle>"
            for p, w in enumerate(worst)
        ]
        label = _TOP + 16 * (index + 1)
        parts.append(
            f'<circle cx="{_WIDTH - _RIGHT + 16}" cy="{label - 4}" r="5" fill="{colour}"/>'
            f'<text x="{_WIDTH - _RIGHT + 28}" y="{label}">{name}</text>'
        )
    return "".join(parts) + "</svg>"


def _write_png(comparison: Comparison, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, means, worst) in enumerate(series(comparison)):
        colour = _COLOURS[index % len(_COLOURS)]
        axes.plot([100 * max(m, _LEAST) for m in means], color=colour, label=name)
        axes.plot([100 * max(w, _LEAST) for w in worst], ".", color=colour, markersize=2)
    axes.axhline(100 * comparison.limits.row, color="#b00020", linestyle="--", label="limit")
    axes.set(yscale="log", xlabel="position", ylabel="error of a row, %", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)
