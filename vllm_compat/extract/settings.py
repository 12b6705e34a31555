"""What the files of a folder were made with, and which of it a run must share to go on there.

Decided by whether a setting changes a byte of the files:

    model.identity, layer_ids       every state
    data.*                          which sample is which file, and its mask
    seq_length                      where samples are cut; with "dynamic" and "longrope"
                                    scaling every state, because vLLM builds its cache of
                                    rotations for max_model_len (rotary_embedding/, 0.16.0)
    versions.*                      kernels, chat templates; --mixed-versions goes on
    batch_size, tensor_parallel_size, cpus_per_replica
                                    the last bits of sums: noted, and told
    path                            nothing

Replicas, executor, transport, memory and processes for the preprocessing are not noted at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import OutputConflictError
from .files import data_files, write_whole

__all__ = [
    "BEGUN",
    "FORMAT",
    "ROUNDING",
    "check_folder",
    "compare",
    "differences",
    "read",
    "roundings",
    "write",
]

FORMAT = 1
BEGUN = Path("manifest.d", "begun.json")
# Noted and told, never refused. In what shapes and by how many threads kernels add up decides
# about the last bits of a sum, not about what a state is; the path of a checkpoint or of data
# about nothing.
ROUNDING = ("batch_size", "tensor_parallel_size", "cpus_per_replica")
_TOLD = ("path", *ROUNDING)


def check_folder(path: Path, facts: dict[str, Any], mixed_versions: bool = False) -> None:
    """Refuses a folder that a run with these facts could not go on in; changes nothing.

    Args:
        path: of the folder; it need not be there.
        facts: those that are known so far.
        mixed_versions: versions may differ.

    Raises:
        OutputConflictError: it has files of other settings, or of another program.
    """
    if not path.is_dir() or next(data_files(path), None) is None:
        return
    candidates = (path / "manifest.json", path / BEGUN)
    found = next((p for p in candidates if p.exists()), None)
    if found is None:
        raise OutputConflictError(
            f"{path} has data files and no manifest.json: another program wrote them. "
            "Take another folder."
        )
    if facts:
        compare(path, read(found), facts, mixed_versions)


def compare(
    path: Path, there: dict[str, Any], facts: dict[str, Any], mixed_versions: bool = False
) -> None:
    """Refuses what was made with other settings.

    Args:
        path: of the folder.
        there: what its manifest says.
        facts: of this run.
        mixed_versions: versions may differ.

    Raises:
        OutputConflictError: each difference in it, and what to do.
    """
    if there.get("format") != FORMAT:
        raise OutputConflictError(
            f"The manifest of {path} is of format {there.get('format')!r}; this version of "
            f"vllm-compat writes format {FORMAT}."
        )
    if mixed_versions:
        facts = {key: value for key, value in facts.items() if key != "versions"}
    found = list(differences(there, facts))
    if found:
        versions = all(each.startswith("versions.") for each in found)
        hint = (
            "Go on with --mixed-versions, or take another folder."
            if versions
            else "Take another folder, or the same settings."
        )
        raise OutputConflictError(
            f"{path} was written with other settings: {'; '.join(found)}. {hint}"
        )


def read(path: Path) -> dict[str, Any]:
    """A manifest.

    Raises:
        OutputConflictError: it can't be read.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise OutputConflictError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise OutputConflictError(f"{path} is no manifest.")
    return found


def write(path: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest, whole or not at all."""
    write_whole(path, (json.dumps(manifest, indent=2) + "\n").encode())


def roundings(there: dict[str, Any], settings: dict[str, Any]) -> Iterator[str]:
    """What was other and can show in last bits; older folders don't say all of it."""
    before = there.get("settings")
    for name in ROUNDING:
        value = before.get(name) if isinstance(before, dict) else None
        if value is not None and name in settings and value != settings[name]:
            yield f"{name} {value}, not {settings[name]}"


def differences(there: dict[str, Any], facts: dict[str, Any], under: str = "") -> Iterator[str]:
    """A clause for each fact that is other than what is there."""
    for key, value in facts.items():
        before = there.get(key)
        if key in _TOLD:
            continue
        if isinstance(value, dict):
            yield from differences(
                before if isinstance(before, dict) else {}, value, f"{under}{key}."
            )
        elif before != value:
            yield f"{under}{key} {json.dumps(before)} there, {json.dumps(value)} now"
