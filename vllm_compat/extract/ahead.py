"""What can be told before anything is loaded: no torch, no vLLM, no tokenizer, no data set.

Nothing here refuses what it is not sure of; the same is found again where it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..model_shape import find_shape
from .errors import DiskError, ExtractError

__all__ = [
    "check_layers",
    "check_model",
    "check_numbers",
    "check_output",
    "check_space",
    "layer_count",
]

_ANSWER = 10.0  # seconds for the hub
# Files that some tokenizer of transformers is read from; tokenization_x.py is a checkpoint's
# own.
_TOKENIZERS = ("tokenizer", "tokenization_")
_VOCABULARIES = {"vocab.json", "vocab.txt", "tekken.json", "spiece.model"}
_VOCABULARY_ENDINGS = (".model", ".tiktoken", ".gguf", ".bpe")


def check_numbers(
    given: Sequence[tuple[str, int | None, int]], gpu_memory_utilization: float, executor: str
) -> None:
    """Refuses settings that nothing can be done with.

    Args:
        given: options, their values (None: not given), and the least that is possible.
        gpu_memory_utilization: a part of 1.
        executor: vLLM's.

    Raises:
        ExtractError: the option, and what is possible.
    """
    for name, value, least in given:
        if value is not None and value < least:
            raise ExtractError(f"{name} {value}: at least {least} is needed.")
    if not 0 < gpu_memory_utilization <= 1:
        raise ExtractError(
            f"--gpu-memory-utilization {gpu_memory_utilization}: a part of 1 is wanted."
        )
    if executor not in ("mp", "ray"):
        raise ExtractError(f"--executor {executor}: mp or ray is possible.")


def check_model(model: str) -> None:
    """Refuses a folder without config or tokenizer, and a name that the hub doesn't have.

    The hub is asked once, and only for what isn't in the cache: transformers would try again
    for a minute and more.

    Raises:
        ExtractError: what is missing.
    """
    folder = Path(model)
    if not folder.exists():
        _check_hub(model)
        return
    if not (folder / "config.json").is_file():
        raise ExtractError(f"{model} is no checkpoint: it has no config.json.")
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise ExtractError(f"{model} can't be read: {error.strerror or error}.") from error
    if not any(
        name.startswith(_TOKENIZERS)
        or name in _VOCABULARIES
        or name.endswith(_VOCABULARY_ENDINGS)
        for name in names
    ):
        raise ExtractError(
            f"{model} has no tokenizer (tokenizer.json, tokenizer_config.json or the like): "
            "copy those files from the model that it was made of."
        )


def layer_count(model: str) -> int | None:
    """How many decoder layers config.json says; None if it can't be had or doesn't say.

    Args:
        model: a folder, or a name whose config is in the hub's cache.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _cached(model)
    if path is None:
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    shape = find_shape(config)
    return None if shape is None else shape.layers


def check_layers(model: str, layers: Sequence[int], count: int | None) -> None:
    """Refuses layers that the model doesn't have.

    Args:
        model: for the message.
        layers: that are wanted.
        count: how many there are; None: not known.

    Raises:
        ExtractError: the layers, and which there are.
    """
    if count is None:
        return
    if outside := [layer for layer in layers if not 0 <= layer < count]:
        raise ExtractError(
            f"--layers {' '.join(map(str, outside))}: the layers of {model} are 0 to "
            f"{count - 1}."
        )


def check_output(path: Path) -> None:
    """Refuses a folder that can't be made or written to.

    Raises:
        DiskError: the path, and why.
    """
    try:
        there = next(p for p in (path, *path.parents) if p.exists())
    except OSError as error:  # a name too long, a part of it that is no folder
        raise DiskError(f"{path} can't be written to: {error.strerror or error}.") from error
    if not there.is_dir():
        raise DiskError(f"{path} can't be written to: {there} is a file, not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise DiskError(f"{path} can't be written to: no permission to write in {there}.")


def check_space(path: Path, needed: int) -> None:
    """Refuses a disk that is too small.

    Args:
        path: on it; need not be there.
        needed: bytes, at least.

    Raises:
        DiskError: how much there is, and how much is needed.
    """
    there = next(p for p in (path, *path.parents) if p.exists())
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return
    # Some network file systems say 0 of everything.
    if usage.total and usage.free < needed:
        raise DiskError(
            f"{path}: {_size(needed)} are still to be written, and the disk has "
            f"{_size(usage.free)} free. --ignore-free-space begins all the same; when the disk "
            "is full the run stops, and the same command goes on later."
        )


def _size(nbytes: int) -> str:
    from ..cli.console import human_bytes

    return human_bytes(nbytes)


def _cached(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        found: Any = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):
        return None
    return Path(found) if isinstance(found, str) else None


def _check_hub(model: str) -> None:
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ExtractError(f"There is no folder {model}.")
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        return  # transformers will say what it lacks
    if _cached(model) is not None:
        return
    try:
        HfApi().model_info(model, timeout=_ANSWER)
    except Exception as error:  # of requests or of httpx, by the hub's release
        if isinstance(error, HfHubHTTPError) and not isinstance(error, RepositoryNotFoundError):
            return  # it is there, and something is the matter: what, is found by using it
        raise ExtractError(
            f"{model} is neither a folder nor a model that can be had from the hub: "
            f"{_why(error)}"
        ) from error


def _why(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "it is gated, and this user has no access to it (HF_TOKEN)."
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has none of that name, or not for this user (HF_TOKEN)."
    if isinstance(error, ValueError):
        return " ".join(str(error).split())
    return "it isn't in the cache, and the hub can't be reached or is turned off."
