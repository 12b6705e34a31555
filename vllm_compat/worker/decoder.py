"""Finds the decoder layers of a vLLM model, and reads what one of them is given and returns.

No name says which layers are the decoder's: ChatGLM has them in ``encoder``, and a vision
tower may have as many. Where several lists could be meant, the one that runs for text is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..model_shape import shape_of

__all__ = ["Decoder", "find_decoder", "hidden_of", "positions_of", "residual_of"]

_LIST_NAMES = ("layers", "h", "blocks", "block")


@dataclass(frozen=True)
class Decoder:
    """The decoder of a model.

    Attributes:
        model: what runs; all that is called besides the layers is inside of it.
        layers: all decoder layers, first to last.
        path: dotted path of the layers in the model, for messages.
        hidden_size: width of the residual stream.
    """

    model: nn.Module
    layers: nn.ModuleList
    path: str
    hidden_size: int


def find_decoder(
    model: nn.Module, text_config: Any, forward: Callable[[], Any] | None = None
) -> Decoder:
    """Finds the language model's decoder layers inside any wrapper.

    Args:
        model: the model of a vLLM model runner.
        text_config: ``vllm_config.model_config.hf_text_config``.
        forward: runs the model on a few tokens of text. Called only where the modules alone
            don't say which list it is.

    Raises:
        UnsupportedModelError: no list of as many layers as the config says, or several; or
            the config doesn't say.
    """
    name = type(model).__name__
    shape = shape_of(text_config, name)
    count = shape.layers
    found: dict[str, nn.ModuleList] = {}
    for start, path in _language_models(model):
        lists = {f"{path}.{inner}".strip("."): module for inner, module in _lists(start, count)}
        if len(lists) > 1 and forward is not None:
            lists = _that_run(lists, forward)
        if len(lists) == 1:
            path, layers = lists.popitem()
            return Decoder(model, layers, path, shape.hidden_size)
        found = found or lists
    what = "several lists" if found else "no list"
    raise UnsupportedModelError(
        f"{name}: {what} of {count} decoder layers in the model"
        + (f" ({', '.join(found)})." if found else ".")
    )


def _lists(start: nn.Module, count: int) -> list[tuple[str, nn.ModuleList]]:
    """The lists of ``count`` modules that could be the decoder's layers.

    Not those inside of another one (experts of a layer, say); and where one has a name that
    vLLM's models give their layers, not those with others.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    inside: set[int] = set()
    for path, module in start.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            if id(module) not in inside:
                found.append((path, module))
            inside.update(id(inner) for inner in module.modules())
    usual = [(path, m) for path, m in found if path.rpartition(".")[2] in _LIST_NAMES]
    return usual or found


def _that_run(
    lists: dict[str, nn.ModuleList], forward: Callable[[], Any]
) -> dict[str, nn.ModuleList]:
    """Those of which every module is called for text."""
    called: set[int] = set()
    handles = [
        module.register_forward_pre_hook(lambda module, args: called.add(id(module)))
        for modules in lists.values()
        for module in modules
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return {
        path: modules
        for path, modules in lists.items()
        if all(id(module) in called for module in modules)
    }


def _language_models(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Narrowest first: what the wrapper calls its language model, then the whole."""
    # Both can be missing, and both can raise (get_language_model: NotImplementedError
    # where a wrapper has none).
    with contextlib.suppress(Exception):
        language_model = model.get_language_model()
        if isinstance(language_model, nn.Module) and language_model is not model:
            yield language_model, "get_language_model()"
    with contextlib.suppress(Exception):
        language_model = model.language_model
        if isinstance(language_model, nn.Module):
            yield language_model, "language_model"
    yield model, ""


def hidden_of(output: Any) -> torch.Tensor:
    """The first tensor of a layer's return."""
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, torch.Tensor):
        raise UnsupportedModelError(f"a decoder layer returns a {type(first).__name__}.")
    return first


def residual_of(output: Any) -> torch.Tensor | None:
    """The second tensor of a layer's return, if it has the shape of the first."""
    if isinstance(output, (tuple, list)) and len(output) > 1:
        second = output[1]
        if isinstance(second, torch.Tensor) and second.shape == output[0].shape:
            return second
    return None


def positions_of(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The positions that a decoder layer was called with, or None if it takes none."""
    try:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs)
    except TypeError:
        return None
    for name in ("positions", "position_ids"):
        value = bound.arguments.get(name, bound.arguments.get("kwargs", {}).get(name))
        if isinstance(value, torch.Tensor):
            return value
    return None
