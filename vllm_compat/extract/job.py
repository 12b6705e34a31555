"""What is asked for, in a form that travels to replicas, and the identity of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .. import model_shape
from ..errors import UnsupportedModelError
from .ahead import check_model
from .errors import ExtractError

__all__ = ["Job", "default_layers", "model_identity", "on_cpu", "row_bytes", "versions"]

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pth")
_CODE = ".py"  # of checkpoints that bring their own
_PROBES = 64
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class Job:
    """How one generator is made. Plain values: it is pickled to the actors.

    Attributes:
        model: folder of a checkpoint, or its name on the hub.
        layer_ids: layers whose output is wanted; None for the generator's own choice.
        seq_length: tokens that vLLM reserves for a sample (``max_model_len``). The generator
            cuts a sample after ``seq_length - 1`` of them, because vLLM wants room for one
            more.
        tensor_parallel_size: devices of one generator.
        gpu_memory_utilization: the generator's argument.
        executor: vLLM's executor: ``mp``, or ``ray`` for one generator over several machines.
        transport: as for :func:`vllm_compat.apply`.
        cpus: CPU cores of one generator; None leaves them to vLLM.
        identity: what :func:`model_identity` must say where the replica runs; None: anything.
        versions: what :func:`versions` must say there; None: anything.
    """

    model: str
    layer_ids: tuple[int, ...] | None = None
    seq_length: int = 2048
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    executor: Literal["mp", "ray"] = "mp"
    transport: Literal["auto", "shared", "rpc"] = "auto"
    cpus: int | None = None
    identity: str | None = None
    versions: tuple[tuple[str, str], ...] | None = None

    def check_here(self) -> None:
        """Raises ExtractError if this machine would compute other states than the first."""
        if self.versions is not None:
            here = dict(versions())
            other = [f"{n} {here[n]}, not {v}" for n, v in self.versions if here.get(n) != v]
            if other:
                raise ExtractError(
                    f"{os.uname().nodename} has other versions than the machine that this run "
                    f"was started on: {', '.join(other)}."
                )
        if self.identity is not None and model_identity(self.model) != self.identity:
            raise ExtractError(
                f"The checkpoint {self.model} on {os.uname().nodename} is not the one of the "
                "machine that this run was started on."
            )


def versions() -> list[tuple[str, str]]:
    """What is installed of the packages that decide about the states."""
    from .. import __version__
    from ..environment import detect

    return [(p.name, p.text) for p in detect().packages()] + [("vllm-compat", __version__)]


def on_cpu() -> bool:
    """Whether the vLLM that is installed is one for CPUs."""
    from ..environment import detect

    vllm = detect().vllm
    return vllm is None or "cpu" in f"{vllm.distribution} {vllm.text}"


def model_identity(model: str) -> str:
    """A name for the contents of a checkpoint.

    Of a folder: a hash of its config, its code, and of each file of weights its name, its size
    and 64 pieces of 64 KiB spread over it. That takes a fraction of a second, and a checkpoint
    that was trained on, merged or quantised differs in nearly every piece. Of a name on the
    hub: the commit that is in the cache.

    Raises:
        ExtractError: there is no such checkpoint.
    """
    folder = Path(model)
    if not folder.is_dir():
        return _hub_identity(model)
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    if not config.is_file():
        raise ExtractError(f"{model} is no checkpoint: it has no config.json.")
    for path in sorted(folder.iterdir()):
        if path.suffix == _CODE or path == config:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        elif path.suffix in _WEIGHTS:
            _weigh(path, digest)
    return f"contents:{digest.hexdigest()}"


def _weigh(path: Path, digest: Any) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        step = max(_PROBE_BYTES, size // _PROBES)
        for offset in range(0, size, step):
            file.seek(offset)
            digest.update(file.read(_PROBE_BYTES))


def _hub_identity(model: str) -> str:
    from transformers.utils.hub import cached_file

    check_model(model)
    try:
        config = cached_file(model, "config.json")
    except (OSError, ValueError) as error:
        sentence = str(error).strip().splitlines()[0]
        raise ExtractError(
            f"{model} is neither a folder nor a model that can be had from the hub: {sentence}"
        ) from error
    parts = Path(config).parts
    commit = parts[parts.index("snapshots") + 1] if "snapshots" in parts else "unknown"
    return f"hub:{model}@{commit}"


def default_layers(model: str) -> tuple[int, ...]:
    """The layers that the generator takes if none are named.

    Needed before there is a generator, to compare it with what is in the folder.

    Raises:
        ExtractError: the config doesn't say how many layers there are.
    """
    return model_shape.default_layers(_shape(model).layers)


def row_bytes(model: str, layers: Sequence[int]) -> int:
    """Bytes that a token takes in a file, at least.

    Its states, of two bytes as vLLM computes them, its id and its place in the mask.

    Raises:
        ExtractError: the config doesn't say how wide the layers are.
    """
    return len(layers) * _shape(model).hidden_size * 2 + 16


def _shape(model: str) -> model_shape.ModelShape:
    try:
        return model_shape.read_shape(model)
    except UnsupportedModelError as error:
        raise ExtractError(str(error)) from error
