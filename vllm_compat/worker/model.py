"""Finds the decoder layers of a vLLM model, and how they return the residual stream.

vLLM's decoder layers return a tensor, or a tuple of two or three. In most tuples the second
element is a residual that has yet to be added; in some (Cohere2, EXAONE-4) it is a left-over
and adding it counts it twice. Nothing but the model's own forward says which. So one forward
of a few tokens is run at setup, and the last layer's return is held against what the model's
final norm is given: that *is* the residual stream after the last layer. Whether the norm adds
a second tensor that it is given, or hands it through (Cohere's does), is asked of the norm
itself: a norm hardly notices a factor of two, so comparing normed states would not do. The
last layer is asked the same question about the residual that it is given, and both answers
have to agree: in Chameleon-30B they don't, because vLLM's own model counts it twice there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UnsupportedModelError

__all__ = ["Convention", "Decoder", "establish_convention", "find_decoder"]

Convention = Literal["hidden", "hidden+residual"]
"""``hidden``: the first element is the stream. ``hidden+residual``: the sum of two."""

_LIST_NAMES = ("layers", "h", "blocks", "block")
_OTHER_TOWERS = ("vision", "visual", "audio", "speech", "image", "encoder", "mtp", "draft")


@dataclass(frozen=True)
class Decoder:
    """The decoder of a model.

    Attributes:
        base: the module that owns the layers and the final norm.
        layers: all decoder layers, first to last.
        path: dotted path of the layers in the model, for messages.
        hidden_size: width of the residual stream.
    """

    base: nn.Module
    layers: nn.ModuleList
    path: str
    hidden_size: int


def find_decoder(model: nn.Module, text_config: Any) -> Decoder:
    """Finds the language model's decoder layers inside any wrapper.

    Args:
        model: the model of a vLLM model runner.
        text_config: ``vllm_config.model_config.hf_text_config``.

    Raises:
        UnsupportedModelError: no list of as many layers as the config says, or several.
    """
    count = getattr(text_config, "num_hidden_layers", None)
    hidden_size = getattr(text_config, "hidden_size", None)
    name = type(model).__name__
    if not count or not hidden_size:
        raise UnsupportedModelError(
            f"{name}: its config doesn't say num_hidden_layers and hidden_size."
        )
    found: dict[int, Decoder] = {}
    for start, path in _language_models(model):
        for inner, module in start.named_modules():
            full = f"{path}.{inner}".strip(".")
            if (
                isinstance(module, nn.ModuleList)
                and len(module) == count
                and full.rpartition(".")[2] in _LIST_NAMES
                and not any(tower in full.lower() for tower in _OTHER_TOWERS)
            ):
                base = _owner(start, inner)
                found.setdefault(id(module), Decoder(base, module, full, hidden_size))
        if len(found) == 1:
            return next(iter(found.values()))
    what = "several lists" if found else "no list"
    raise UnsupportedModelError(
        f"{name}: {what} of {count} decoder layers in the model"
        + (f" ({', '.join(d.path for d in found.values())})." if found else ".")
    )


def _owner(start: nn.Module, path: str) -> nn.Module:
    """The innermost module around the layers that has anything besides them.

    PLaMo keeps them in a module of their own, beside the final norm.
    """
    while path:
        path = path.rpartition(".")[0]
        owner = start.get_submodule(path)
        if len(list(owner.children())) > 1:
            return owner
    return start


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


@dataclass
class _Trace:
    """What happened in the trial forward."""

    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]]
    order: list[int]
    model_output: Any = None
    layer_adds: bool | None = None  # whether the last layer uses the residual it is given
    final: nn.Module | None = None
    final_name: str = ""
    final_args: tuple[Any, ...] = ()
    final_kwargs: dict[str, Any] = field(default_factory=dict)


def establish_convention(decoder: Decoder, forward: Any) -> tuple[Convention, torch.dtype]:
    """Runs ``forward`` once and finds out what the layers return.

    Args:
        decoder: from :func:`find_decoder`.
        forward: runs the model on a few tokens, with hooks.

    Returns:
        The convention, and the dtype of the residual stream.

    Raises:
        UnsupportedModelError: layers run more than once or out of order, return something
            of another shape or not finite, or nothing that they return is what the final
            norm is given.
    """
    name = type(decoder.base).__name__
    trace = _trace(decoder, forward)
    last = len(decoder.layers) - 1
    if trace.order != list(range(last + 1)):
        raise UnsupportedModelError(
            f"{name}: its decoder layers don't run once each, in order "
            f"(they ran as {trace.order[:12]}...)."
        )
    shapes = {(tuple(h.shape), r is None) for h, r in trace.outputs.values()}
    if len(shapes) != 1 or trace.outputs[last][0].shape[-1] != decoder.hidden_size:
        raise UnsupportedModelError(
            f"{name}: its decoder layers don't all return one residual stream of "
            f"{decoder.hidden_size} columns (shapes: {sorted(s for s, _ in shapes)})."
        )
    for index in trace.order:
        if not all(torch.isfinite(t).all() for t in trace.outputs[index] if t is not None):
            raise UnsupportedModelError(
                f"{name}: what decoder layer {index} returns is not finite (NaN or infinity): "
                "look at its weights and dtype."
            )
    hidden, residual = trace.outputs[last]
    truth, source = _stream_after(trace, name)
    if truth.numel() != hidden.numel():
        # Gemma3n: the layers return a stack of streams that is mixed into one afterwards.
        raise UnsupportedModelError(
            f"{name}: its decoder layers return {tuple(hidden.shape)}, and {source} "
            f"{tuple(truth.shape)}: not one residual stream; its states would be a guess."
        )
    truth = truth.reshape(hidden.shape)
    fitting: list[Convention] = []
    if _same(hidden, truth):
        fitting.append("hidden")
    if residual is not None and _same(hidden + residual, truth):
        fitting.append("hidden+residual")
    if len(fitting) != 1:
        reason = (
            "its last decoder layer's residual is nothing in the trial forward, so that two "
            "readings of it agree"
            if fitting
            else f"neither what its last decoder layer returns, nor the sum of it, is {source}"
        )
        raise UnsupportedModelError(f"{name}: {reason}; its states would be a guess.")
    if trace.layer_adds is not None and trace.layer_adds != (fitting[0] != "hidden"):
        raise UnsupportedModelError(
            f"{name}: its decoder layers and what comes next ({trace.final_name}) disagree "
            "about the residual that they are given; its states would be a guess."
        )
    return fitting[0], hidden.dtype


def _stream_after(trace: _Trace, name: str) -> tuple[torch.Tensor, str]:
    """The residual stream after the last layer, and what it was read from."""
    if trace.final is not None:
        return _stream_into(trace), f"what comes next ({trace.final_name}) is given"
    # Some models (Step3.5) norm in compute_logits: then the model's output is the stream.
    output = hidden_of(trace.model_output)
    if output.numel() == trace.outputs[trace.order[-1]][0].numel():
        return output, "what the model returns"
    raise UnsupportedModelError(
        f"{name}: nothing that is called after its last decoder layer takes a residual "
        "stream, so that what the layers return can't be held against anything."
    )


def _stream_into(trace: _Trace) -> torch.Tensor:
    """The residual stream that the final norm sees."""
    first, *others = _stream_tensors(trace)
    if not others:
        return first
    noise = torch.randn_like(first) * first.float().std().to(first.dtype)
    with_noise, without = (
        _call_final(trace, second) for second in (noise, torch.zeros_like(noise))
    )
    return first if _same(with_noise, without) else first + others[0]


def _stream_tensors(trace: _Trace) -> list[torch.Tensor]:
    values = (*trace.final_args, *trace.final_kwargs.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def _call_final(trace: _Trace, second: torch.Tensor) -> torch.Tensor:
    """The final norm on the same first tensor, with another in place of the second."""
    seen = 0

    def put(value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, torch.Tensor):
            return value
        seen += 1
        # Clones: the fused kernels write into what they are given.
        return (second if seen == 2 else value).clone()

    args = [put(value) for value in trace.final_args]
    kwargs = {key: put(value) for key, value in trace.final_kwargs.items()}
    assert trace.final is not None
    return hidden_of(trace.final(*args, **kwargs)).clone()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.float(), b.float()
    scale = float(b.abs().max())
    # Kernels add in float32 or in the model's dtype: bfloat16 has 8 bits.
    return scale > 0 and float((a - b).abs().max()) <= 1e-2 * scale


def _zeroed(module: nn.Module, args: Any, output: Any) -> Any:
    return torch.zeros_like(output) if isinstance(output, torch.Tensor) else None


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _uses_residual(
    layer: nn.Module,
    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bool | None:
    """Whether a layer's return depends on the residual that the layer before handed it.

    None if it isn't given one. Runs inside of the trial forward, because attention needs
    its context; ``forward`` and not the call, which would run the hooks again.
    """
    residual = outputs[len(outputs) - 2][1] if len(outputs) > 1 else None
    if residual is None:
        return None

    def is_residual(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.shape == residual.shape
            and torch.equal(value, residual)
        )

    if not any(is_residual(value) for value in (*args, *kwargs.values())):
        return None
    noise = residual + torch.randn_like(residual) * residual.float().std().to(residual.dtype)

    def put(value: Any) -> Any:
        return noise.clone() if is_residual(value) else _cloned(value)

    again = layer.forward(
        *(put(value) for value in args), **{key: put(value) for key, value in kwargs.items()}
    )
    last_hidden, last_residual = outputs[len(outputs) - 1]
    changed = not _same(hidden_of(again), last_hidden)
    other = residual_of(again)
    if last_residual is not None and other is not None:
        changed = changed or not _same(other, last_residual)
    return changed


def _trace(decoder: Decoder, forward: Any) -> _Trace:
    trace = _Trace({}, [])
    last = len(decoder.layers) - 1
    handles = []

    def on_layer(index: int) -> Any:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            residual = residual_of(output)
            trace.order.append(index)
            trace.outputs[index] = (
                hidden_of(output).clone(),
                residual.clone() if residual is not None else None,
            )
            if index == last and given:
                trace.layer_adds = _uses_residual(module, trace.outputs, *given)

        return hook

    given: list[Any] = []

    def before_last(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Clones: the layer's own kernels write into what it is given.
        given[:] = [
            tuple(_cloned(value) for value in args),
            {key: _cloned(value) for key, value in kwargs.items()},
        ]

    def on_other(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if last not in trace.outputs or trace.final is not None:
                return
            size = trace.outputs[last][0].numel()

            def keep(value: Any) -> Any:
                fits = isinstance(value, torch.Tensor) and value.numel() == size
                return value.clone() if fits else value

            if any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())):
                trace.final, trace.final_name = module, name
                trace.final_args = tuple(keep(value) for value in args)
                trace.final_kwargs = {key: keep(value) for key, value in kwargs.items()}

        return hook

    # A hook that stayed would slow down every later forward.
    try:
        for index, layer in enumerate(decoder.layers):
            handles.append(layer.register_forward_hook(on_layer(index), with_kwargs=True))
        handles.append(
            decoder.layers[last].register_forward_pre_hook(before_last, with_kwargs=True)
        )
        for name, child in decoder.base.named_children():
            if child is not decoder.layers:
                handles.append(
                    child.register_forward_pre_hook(on_other(name), with_kwargs=True)
                )
        for module in decoder.base.modules():
            # vLLM's attention layers. Without metadata some backends leave their output as
            # it was allocated (the CPU's): garbage, NaN now and then.
            if hasattr(module, "impl") and hasattr(module, "kv_cache"):
                handles.append(module.register_forward_hook(_zeroed))
        trace.model_output = forward()
    finally:
        for handle in handles:
            handle.remove()
    return trace
