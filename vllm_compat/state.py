"""Who has called ``apply()``, and what is on because of it: the state of this process.

:mod:`vllm_compat.activation` changes it, under one lock. Adapters and generators read it here,
and so don't need the verbs, which need the patches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .features import Features
from .imports import ImportWatch
from .record import Patch
from .report import Report
from .seams import Commit
from .settings import Options, Settings

__all__ = [
    "STATE", "Activation", "features", "generation", "is_active", "options", "overridden",
]  # fmt: skip


@dataclass
class Activation:
    """What is on.

    Attributes:
        holders: who asked for the patches, in the order in which they did, and what each
            asked for.
        report: what was decided; None while the patches are off.
        patches: those that are on.
        commits: one for each module with seams; more if one was executed again
            (importlib.reload).
        watch: our finder in ``sys.meta_path``.
        watched: the generator's module, if it was executed under our eyes.
        generation: changes whenever the patches are put on or taken off: whoever began under
            another number was overtaken.
    """

    holders: dict[object, dict[str, Any]] = field(default_factory=dict)
    report: Report | None = None
    patches: tuple[Patch, ...] = ()
    commits: list[Commit] = field(default_factory=list)
    watch: ImportWatch | None = None
    watched: Any = None
    generation: int = 0


STATE = Activation()


def is_active() -> bool:
    """Whether an ``apply()`` is in force."""
    return bool(STATE.holders)


def generation() -> int:
    """A number that changes whenever the patches are put on or taken off."""
    return STATE.generation


def overridden() -> list[str]:
    """A sentence for each name that somebody else has replaced over ours."""
    return [sentence for made in STATE.commits for sentence in made.overridden()]


def features() -> Features:
    """What the patches that are on say of the installed vLLM and speculators."""
    return Features.of(STATE.patches)


def options() -> Options:
    """What was asked for; where several did, the last of them who named it.

    Raises:
        InvalidInputError: one of our environment variables has a wrong value.
    """
    asked: dict[str, Any] = {"transport": Settings.read().transport}
    for wishes in list(STATE.holders.values()):
        asked.update(wishes)
    return Options(**asked)
