"""Runs speculators' hidden-states generator, unmodified, on the vLLM that is installed.

    import vllm_compat
    vllm_compat.apply()

before (or after) ``speculators.data_generation`` is imported. Importing this package
imports neither vLLM, torch, transformers nor speculators, and changes nothing.
"""

from __future__ import annotations

from .activation import applied, apply, current, revert
from .environment import Environment, Package
from .errors import (
    CaptureError,
    EngineDeadError,
    InvalidInputError,
    PatchConflictError,
    UnsupportedEnvironmentError,
    UnsupportedModelError,
    UntestedVersionWarning,
    VllmCompatError,
)
from .record import Patch
from .report import Entry, Report

__all__ = [
    "CaptureError",
    "EngineDeadError",
    "Entry",
    "Environment",
    "InvalidInputError",
    "Package",
    "Patch",
    "PatchConflictError",
    "Report",
    "UnsupportedEnvironmentError",
    "UnsupportedModelError",
    "UntestedVersionWarning",
    "VllmCompatError",
    "applied",
    "apply",
    "revert",
    "status",
]

__version__ = "0.1.0"


def status(*, workers: bool = True) -> Report:
    """What is installed, which patches are on, which are not and why.

    Args:
        workers: also ask the workers of every live generator what they run. A generator
            that is busy or dead is noted as such.

    Raises:
        UnsupportedEnvironmentError: as :func:`apply` would.
        InvalidInputError: one of our environment variables has a wrong value.
    """
    report = current()
    if not workers:
        return report
    from .session import describe_workers

    described = tuple(describe_workers())
    # All ranks of a generator say the same.
    notes = dict.fromkeys(w["rope"]["note"] for w in described if w.get("rope"))
    return Report(report.environment, report.entries, (*report.notes, *notes), described)
