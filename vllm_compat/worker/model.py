"""Finds the decoder layers of a vLLM model, and how they return the residual stream.

vLLM's decoder layers return a tensor, or a tuple of two or three. In most tuples the second
element is a residual that has yet to be added; in some (Cohere2, EXAONE-4) it is a left-over
and adding it counts it twice. Nothing but the model's own forward says which. So one forward
of a few tokens is run at setup, and the last layer's return is held against what the model's
final norm is given: that *is* the residual stream after the last layer. Whether the norm adds
a second tensor that it is given, or hands it through (Cohere's does), is asked of the norm
itself: a norm hardly notices a factor of two, so comparing normed states would not do. The
layers are asked the same question about the residual that they are given, each of them
(a hybrid model has several kinds), and all answers have to agree: in Chameleon-30B they don't,
because vLLM's own model counts it twice there.

Nor does a name say which layers are the decoder's: ChatGLM has them in ``encoder``, and a
vision tower may have as many. Where several lists could be meant, the one that runs for text
is.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..model_shape import shape_of

__all__ = ["Convention", "Decoder", "establish_convention", "find_decoder"]

Convention = Literal["hidden", "hidden+residual"]
"""``hidden``: the first element is the stream. ``hidden+residual``: the sum of two."""

Taken = Literal["hidden", "hidden+residual", "neither"]

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


@dataclass
class _Trace:
    """What happened in the trial forward."""

    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]]
    order: list[int]
    model_output: Any = None
    # As what each layer takes the pair that it is given.
    taken: dict[int, Taken] = field(default_factory=dict)
    final: nn.Module | None = None
    final_name: str = ""
    final_args: tuple[Any, ...] = ()
    final_kwargs: dict[str, Any] = field(default_factory=dict)


def establish_convention(
    decoder: Decoder,
    forward: Callable[[], Any],
    tokens: int,
    caching: Iterable[nn.Module] = (),
) -> tuple[Convention, torch.dtype]:
    """Runs ``forward`` once and finds out what the layers return.

    Args:
        decoder: from :func:`find_decoder`.
        forward: runs the model on a few tokens, with hooks.
        tokens: how many those are.
        caching: what reads the KV cache, which isn't there yet; silent in this run.

    Returns:
        The convention, and the dtype of the residual stream.

    Raises:
        UnsupportedModelError: layers run more than once or out of order, return something
            of another shape or not finite, or nothing that they return is what the final
            norm is given.
    """
    name = type(decoder.model).__name__
    trace = _trace(decoder, forward, caching)
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
    if not truth.numel() == hidden.numel() == tokens * decoder.hidden_size:
        # Gemma3n: the layers return a stack of streams that is mixed into one afterwards.
        # Sequence parallelism: a rank has some of the rows.
        raise UnsupportedModelError(
            f"{name}: for {tokens} tokens its decoder layers return {tuple(hidden.shape)}, "
            f"and {source} {tuple(truth.shape)}: not one residual stream; its states would "
            "be a guess."
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
    for index, taken in trace.taken.items():
        if taken != fitting[0]:
            raise UnsupportedModelError(
                f"{name}: its decoder layer {index} and what comes after the last one "
                f"({trace.final_name}) disagree about the residual that they are given "
                f"({taken}, {fitting[0]}); its states would be a guess."
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
    noise = _noise(first)
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


@contextlib.contextmanager
def _silent(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While it lasts, these modules compute nothing: their output is zero.

    vLLM's attention and state-space layers. Without metadata many leave their output as it was
    allocated: garbage, NaN now and then. ``forward`` is replaced, where a hook would do for
    most: vLLM's Transformers backend calls it by that name.
    """

    def silenced(module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        signature = inspect.signature(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if isinstance(output, torch.Tensor):
                return torch.zeros_like(output)
            # State-space layers write into what they are given.
            given = signature.bind(*args, **kwargs).arguments.get("output")
            if isinstance(given, torch.Tensor):
                given.zero_()
            return output

        return forward

    before: list[tuple[nn.Module, Any]] = []
    try:
        for module in modules:
            before.append((module, vars(module).get("forward")))
            module.forward = silenced(module)
        yield
    finally:
        for module, forward in reversed(before):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _layer_takes(
    layer: nn.Module,
    index: int,
    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Taken | None:
    """As what a layer takes the pair that the layer before handed it.

    It is asked: a layer that ignores the residual doesn't notice another one; a layer that
    adds both doesn't notice what is taken from one and put to the other. Nothing else may
    depend on it, or the sum of the pair isn't the stream: a layer may hand out a sum of this
    rank only and leave it to the next one to reduce it over all ranks.

    None if it isn't given what the layer before returned. Runs inside of the trial forward,
    because attention needs its context; ``forward`` and not the call, which would run the
    hooks again.
    """
    hidden, residual = outputs.get(index - 1, (None, None))
    if hidden is None or residual is None:
        return None
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not any(_is(value, hidden) for value in given):
        return None
    if not any(_is(value, residual) for value in given):
        return None

    def stream(
        new_hidden: torch.Tensor, new_residual: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        def put(value: Any) -> Any:
            if _is(value, residual):
                return new_residual.clone()
            return new_hidden.clone() if _is(value, hidden) else _cloned(value)

        output = layer.forward(*map(put, args), **{key: put(v) for key, v in kwargs.items()})
        return _pair(output)

    # Both, whatever the first says: layers that talk to other ranks must be run as often on
    # each of them.
    before, shift = _pair(outputs[index]), _noise(hidden, residual)
    other_residual = stream(hidden, residual + shift)
    other_split = stream(hidden + shift, residual - shift)
    if all(_same(new, old) for new, old in zip(other_residual, before, strict=True)):
        return "hidden"
    new, old = (torch.stack(pair).sum(0).float() for pair in (other_split, before))
    # Of most rows: with other rounding a token may go to another expert.
    noticed, shifted = (
        torch.linalg.vector_norm(value, dim=-1).median() for value in (new - old, shift.float())
    )
    return "hidden+residual" if noticed < 0.25 * shifted else "neither"


def _noise(*scales: torch.Tensor) -> torch.Tensor:
    """Of the shape and the scale of these; the same on every rank, and nobody else's seed."""
    like = scales[0]
    generator = torch.Generator(like.device).manual_seed(0)
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    scale = sum(tensor.float().std() for tensor in scales)
    return (noise * scale).to(like.dtype)


def _is(value: Any, other: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == other.shape
        and torch.equal(value, other)
    )


def _pair(output: Any) -> tuple[torch.Tensor, ...]:
    """The first tensor of a layer's return, and the second if it has its shape."""
    residual = residual_of(output)
    return (hidden_of(output),) if residual is None else (hidden_of(output), residual)


def _trace(
    decoder: Decoder, forward: Callable[[], Any], caching: Iterable[nn.Module]
) -> _Trace:
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
            taken = _layer_takes(module, index, trace.outputs, *given)
            if taken is not None:
                trace.taken[index] = taken

        return hook

    given: list[Any] = []

    def before_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            handles += [
                layer.register_forward_pre_hook(before_layer, with_kwargs=True),
                layer.register_forward_hook(on_layer(index), with_kwargs=True),
            ]
        inside = set(decoder.layers.modules())
        for name, module in decoder.model.named_modules():
            if module not in inside:
                handles.append(
                    module.register_forward_pre_hook(on_other(name), with_kwargs=True)
                )
        with _silent(caching):
            trace.model_output = forward()
    finally:
        for handle in handles:
            handle.remove()
    return trace
