"""What stops a run, each in one sentence."""

from __future__ import annotations

from ..errors import VllmCompatError

__all__ = ["DiskError", "ExtractError", "OutputConflictError", "ReplicaError"]


class ExtractError(VllmCompatError):
    """A run can't begin or go on. What was written stays."""


class OutputConflictError(ExtractError):
    """The folder holds files of other settings, or another run is writing into it."""


class DiskError(ExtractError):
    """A file could not be written: a full disk, a quota, a limit, a lost mount."""


class ReplicaError(ExtractError):
    """A generator can't be made, or keeps dying."""
