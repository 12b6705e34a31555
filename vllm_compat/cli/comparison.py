"""How ``verify`` shows what it found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .console import Console

if TYPE_CHECKING:
    from ..checks.rows import Comparison

__all__ = ["as_json", "listed", "show"]

_SHOWN = 20  # sentences about faults


def listed(values: Sequence[int]) -> str:
    """Numbers in a sentence."""
    return ", ".join(map(str, values))


def _percent(error: float) -> str:
    return f"{100 * error:.2f} %" if math.isfinite(error) else str(error)


def show(comparison: Comparison, facts: dict[str, Any], console: Console) -> None:
    """Tables by layer and position, and a sentence for each fault."""
    console.heading(
        f"{facts['model']}: {facts['against']}, {facts['prompts']} prompts, "
        f"{facts['tokens']} tokens"
    )
    if facts["rope"]:
        console.line(f"note: {facts['rope']}", style="yellow")
    console.line()
    if comparison.layers:
        columns = ["layer", "mean", "median", "worst row", "where"]
        rows = [
            [
                str(layer.layer),
                _percent(layer.mean),
                _percent(layer.median),
                _percent(layer.worst),
                f"prompt {layer.worst_at[0]}, position {layer.worst_at[1]}",
            ]
            for layer in comparison.layers
        ]
        console.heading("Relative error of a row, by layer")
        console.table(columns, rows, right=columns[:-1])
        console.line()
        columns = ["positions", *(f"layer {layer.layer}" for layer in comparison.layers)]
        rows = [
            [str(first) if first == last else f"{first}-{last}", *map(_percent, errors)]
            for first, last, errors in comparison.by_position()
        ]
        console.heading("Mean error, by position")
        console.table(columns, rows, right=columns)
        console.line()
    for sentence in comparison.wrong[:_SHOWN]:
        console.line(f"wrong: {sentence}", style="red")
    if len(comparison.wrong) > _SHOWN:
        console.line(f"... and {len(comparison.wrong) - _SHOWN} more", style="red")
    for how, count in comparison.shifts():
        console.line(f"{count} rows are {how}.", style="red")
    if comparison.wrong:
        console.line(f"NOT RIGHT: {len(comparison.wrong)} faults.", style="red")
    else:
        console.line("Every row is right.", style="green")


def as_json(comparison: Comparison, facts: dict[str, Any]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        **facts,
        "right": not comparison.wrong,
        "by_layer": [
            {
                "layer": layer.layer,
                "mean": layer.mean,
                "median": layer.median,
                "worst": layer.worst,
                "worst_prompt": layer.worst_at[0],
                "worst_position": layer.worst_at[1],
            }
            for layer in comparison.layers
        ],
        "by_position": [
            {"first": first, "last": last, "mean": errors}
            for first, last, errors in comparison.by_position()
        ]
        if comparison.layers
        else [],
        "moved": [vars(m) for m in comparison.moved],
        "wrong": comparison.wrong,
    }
