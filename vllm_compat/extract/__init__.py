"""Conversations to files of hidden states, with one generator or many.

``extract`` is the command's whole work as a function. ``HiddenStates`` and ``StateFiles`` are
classes for Ray Data's ``map_batches``: one actor, one generator. Importing this package imports
neither torch, vLLM, speculators nor Ray.

    ahead      what can be told before anything is loaded
    job        what is asked for, and what it is compared with when a run goes on
    rows       the user's file, read for what is wrong with it
    unused     rows that speculators makes no sample of
    samples    the conversations, prepared by speculators
    plan       which samples, in which batches
    replica    one generator: batches in, states out, and who failed
    files      data_{i}.pt, whole or not at all
    settings   what files were made with, and what of it must stay the same
    manifest   what is there, and whose it is
    leftovers  what a killed generator would leave in /dev/shm and /tmp
    cores      which CPU cores a replica takes
    actors     replicas as Ray Data's actors
    execution  the batches, computed and accounted for
    run        all of it together
    command    vllm-compat extract
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import DiskError, ExtractError, OutputConflictError, ReplicaError

if TYPE_CHECKING:
    from .actors import HiddenStates, StateFiles
    from .execution import Summary
    from .job import Job
    from .run import extract

__all__ = [
    "DiskError",
    "ExtractError",
    "HiddenStates",
    "Job",
    "OutputConflictError",
    "ReplicaError",
    "StateFiles",
    "Summary",
    "extract",
]

_LATE = {
    "HiddenStates": "actors",
    "StateFiles": "actors",
    "Job": "job",
    "Summary": "execution",
    "extract": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_LATE[name]}", __name__), name)
