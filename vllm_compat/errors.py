"""Every exception that this package raises, under one base class."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "EngineDeadError",
    "InvalidInputError",
    "PatchConflictError",
    "UnsupportedEnvironmentError",
    "UnsupportedModelError",
    "UntestedVersionWarning",
    "VllmCompatError",
]


class VllmCompatError(Exception):
    """Base of all errors of vllm-compat."""


class UnsupportedEnvironmentError(VllmCompatError, ImportError):
    """What is installed can't be made to work; nothing has been changed.

    Raised by :func:`vllm_compat.apply`: vLLM or speculators missing, a speculators
    without the generator, a symbol that a patch relies on gone.
    """


class PatchConflictError(VllmCompatError):
    """A name that has to be replaced is not what vLLM or speculators put there."""


class UnsupportedModelError(VllmCompatError, ValueError):
    """The states of this model can't be captured with certainty; it is refused."""


class InvalidInputError(VllmCompatError, ValueError):
    """An argument or a prompt that was refused before the scheduler saw it."""


class CaptureError(VllmCompatError, RuntimeError):
    """A row of hidden states is missing, doubled, misplaced or not finite.

    The message names the sequence (its index in the batch), the layer and the position. Or a
    sequence that was computed a second time came out otherwise (:mod:`vllm_compat.canary`).
    """


class EngineDeadError(VllmCompatError, RuntimeError):
    """The workers of this generator are gone; it can't be used any more."""


class UntestedVersionWarning(UserWarning):
    """vLLM is newer than any version that the test matrix has passed on."""
