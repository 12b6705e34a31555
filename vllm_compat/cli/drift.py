"""``vllm-compat drift``: what a vLLM has moved of what the patches rely on."""

from __future__ import annotations

from typing import Any

from .. import drift

__all__ = ["add"]


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "drift",
        help="list what a vLLM has moved of what the patches rely on (for maintainers)",
        description=drift.__doc__,
    )
    drift.add_arguments(parser)
    parser.set_defaults(function=drift.run)
