"""The states that transformers computes: the reference for what vLLM's workers captured."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from ..errors import UnsupportedModelError
from ..worker.decoder import find_decoder, hidden_of

__all__ = ["checkpoint_bytes", "transformers_states"]

States = Callable[[Sequence[int]], list[torch.Tensor]]


def checkpoint_bytes(model: Path) -> int:
    """Bytes of the weights of a checkpoint folder; 0 if it holds none that are known."""
    for pattern in ("*.safetensors", "pytorch_model*.bin"):
        sizes = [file.stat().st_size for file in model.glob(pattern)]
        if sizes:
            return sum(sizes)
    return 0


def checkpoint_itemsize(model: Path) -> int:
    """Bytes of one weight of a checkpoint, as its config says; 2 if it doesn't."""
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return 2
    name = config.get("dtype") or config.get("torch_dtype")
    name = name or (config.get("text_config") or {}).get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name).removeprefix("torch."), torch.bfloat16)
    return int(dtype.itemsize) if isinstance(dtype, torch.dtype) else 2


def transformers_states(
    model: str | Path,
    layer_ids: Sequence[int],
    dtype: torch.dtype | str = "auto",
    device: str = "cpu",
    rope_length: int | None = None,
) -> States:
    """Loads a model with transformers and gives a function that computes its states.

    Layer k means the residual stream after decoder layer k, before the final norm. The hidden
    states that transformers itself returns are normed for the last layer; forward hooks on the
    decoder layers are not.

    Args:
        model: a checkpoint's folder, or its name on a hub.
        layer_ids: the layers, in the order of the result; may repeat.
        dtype: of the weights and of the computation; ``auto`` is the checkpoint's own.
        device: a torch device.
        rope_length: the rotary embedding of all prompts is to be that of a sequence of so many
            tokens (``rope_scaling`` "dynamic" and "longrope", which vLLM takes so); more than
            any prompt has. None: each prompt has the one of its own length.

    Returns:
        A function from the token ids of one prompt to a list of tensors ``[len(ids), hidden]``
        on the CPU, one for each of ``layer_ids``.

    Raises:
        UnsupportedModelError: its decoder layers can't be told; or its code doesn't take the
            length for the rotary embedding from ``position_ids``.
    """
    network = _load(str(model), dtype).eval().to(device)
    arguments: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(network.forward).parameters:
        arguments["logits_to_keep"] = 1

    def run(ids: Sequence[int], last: int | None = None) -> None:
        """Runs a prompt; ``last``: and one token more, at that position, after it.

        transformers takes the length of a sequence from its last position. Attention is causal:
        the token itself reaches no other row.
        """
        positions = [*range(len(ids))]
        if last is not None:
            ids, positions = [*ids, ids[-1]], [*positions, last]
            arguments["position_ids"] = torch.as_tensor(
                positions, dtype=torch.int64, device=device
            )[None]
        with torch.inference_mode():
            input_ids = torch.as_tensor(ids, dtype=torch.int64, device=device)
            network(input_ids=input_ids[None], **arguments)

    text_config = network.config.get_text_config()
    layers = find_decoder(network, text_config, lambda: run([1, 2, 3])).layers
    seen: dict[int, torch.Tensor] = {}

    def keeper(layer_id: int) -> Callable[..., None]:
        def keep(_module: Any, _arguments: Any, output: Any) -> None:
            seen[layer_id] = hidden_of(output).detach()

        return keep

    for layer_id in set(layer_ids):
        layers[layer_id].register_forward_hook(keeper(layer_id))

    def states(ids: Sequence[int], last: int | None) -> list[torch.Tensor]:
        seen.clear()
        run(ids, last)
        return [
            seen[layer_id].flatten(0, -2)[: len(ids)].to("cpu", copy=True)
            for layer_id in layer_ids
        ]

    if rope_length is None:
        return lambda ids: states(ids, None)
    try:
        _check_last(states, rope_length - 1)
    except TypeError as error:  # remote code without position_ids
        raise UnsupportedModelError(_NO_LENGTH) from error
    return lambda ids: states(ids, rope_length - 1)


_NO_LENGTH = (
    "transformers' code of this model doesn't take the length for its rotary embedding from "
    "position_ids."
)
_SAME = 1e-3  # relative, of a row; another rotation makes 0.1 and more


def _check_last(states: Callable[[Sequence[int], int | None], Any], last: int) -> None:
    """Makes sure that a token at a far position changes the rotation, and nothing else."""
    ids = [1, 2, 3]
    plain, near, far = states(ids, None), states(ids, len(ids)), states(ids, last)

    def apart(rows: list[torch.Tensor]) -> float:
        pairs = zip(rows, plain, strict=True)
        return max(float((a - b).float().norm() / b.float().norm()) for a, b in pairs)

    noise = apart(near)
    if noise > 0.02 or apart(far) <= max(2 * noise, _SAME):
        raise UnsupportedModelError(_NO_LENGTH)


def _load(model: str, dtype: torch.dtype | str) -> Any:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    # The generator trusts the checkpoint's own code too.
    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    known = type(config) in AutoModelForCausalLM._model_mapping
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    loader = AutoModelForCausalLM if known or remote else AutoModelForImageTextToText
    # Renamed in 4.56, where the old name began to warn.
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    return loader.from_pretrained(model, **{name: dtype}, trust_remote_code=True)
