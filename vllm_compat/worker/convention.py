"""Finds out how a model's decoder layers return the residual stream.

They return a tensor, or a tuple of two or three. In most tuples the second element is a
residual that has yet to be added; in some (Cohere2, EXAONE-4) it is a left-over, and adding it
counts it twice. Nothing but the model's own forward says which. So the model is run on a few
tokens at set-up, and two things are asked:

* What is the final norm given, the last layer's first tensor or the sum of its two?
* As what does each layer, and the final norm, take the pair that it is given?

All answers have to agree. In Chameleon-30B they don't: vLLM's own model counts the residual
twice there.

How a module is asked is in ``asking``. There are two runs, on different tokens and with
different changes, so that no answer hangs on one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UnsupportedModelError
from .asking import Again, Call, Taken, ask, pair_of, places_of, sum_of, verdict
from .decoder import Decoder, hidden_of
from .trial import RUNS, silent

__all__ = ["Convention", "Remember", "establish_convention"]

Convention = Literal["hidden", "hidden+residual"]
"""``hidden``: the first element is the stream. ``hidden+residual``: the sum of two."""

Remember = Callable[[], Again]
"""Called when a module begins; the result opens the context in which it began, each time."""


@dataclass
class _Run:
    """What happened in one forward."""

    outputs: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    model_output: Any = None
    # What each layer says of the pair that it is given: one answer a row, None for no answer.
    layers: dict[int, list[Taken | None]] = field(default_factory=dict)
    # The module called next after the last layer, the tensors it is given, and what it says.
    final: nn.Module | None = None
    final_name: str = ""
    final_given: tuple[torch.Tensor, ...] = ()
    final_says: list[Taken | None] = field(default_factory=list)

    def finite(self) -> bool:
        return all(_finite(*self.outputs[index]) for index in self.order)


def establish_convention(
    decoder: Decoder,
    forward: Callable[[int], Any],
    tokens: int,
    caching: Iterable[nn.Module] = (),
    remember: Remember = lambda: contextlib.nullcontext,
) -> tuple[Convention, torch.dtype]:
    """Runs the model and finds out what its layers return.

    Args:
        decoder: from :func:`~vllm_compat.worker.decoder.find_decoder`.
        forward: runs the model on a few tokens, with hooks; gets the number of the run.
        tokens: how many those are.
        caching: what reads the KV cache, which isn't there yet; silent in these runs.
        remember: keeps the context of a module that is going to be run again.

    Returns:
        The convention, and the dtype of the residual stream.

    Raises:
        UnsupportedModelError: layers run more than once or out of order, return something
            of another shape or not finite, nothing that they return is what the final norm is
            given, or the layers and the final norm disagree.
    """
    name = type(decoder.model).__name__
    # All of them, whatever the first says: layers that talk to other ranks must be run as
    # often on each rank, and the ranks need not come to the same answers.
    quiet = tuple(caching)
    runs = [_run(decoder, forward, quiet, remember, number) for number in range(RUNS)]
    for run in runs:
        _check_structure(run, decoder, name)
    finite = [run for run in runs if run.finite()]
    if not finite:
        run = runs[0]
        index = next(i for i in run.order if not _finite(*run.outputs[i]))
        raise UnsupportedModelError(
            f"{name}: what decoder layer {index} returns is not finite (NaN or infinity): "
            "look at its weights and dtype."
        )
    last = len(decoder.layers) - 1
    convention = _of_the_last(finite, last, tokens * decoder.hidden_size, name)
    for index in range(1, last + 1):
        answers = [answer for run in finite for answer in run.layers.get(index, ())]
        if not answers:
            continue
        taken = verdict(answers)
        if taken is None:
            raise UnsupportedModelError(
                f"{name}: its decoder layer {index} doesn't show as what it takes the residual "
                "that it is given; its states would be a guess."
            )
        if taken != convention:
            raise UnsupportedModelError(
                f"{name}: its decoder layer {index} and what comes after the last one "
                f"({finite[0].final_name}) disagree about the residual that they are given "
                f"({taken}, {convention}); its states would be a guess."
            )
    return convention, finite[0].outputs[last][0].dtype


# --- judging the runs -----------------------------------------------------------------------


def _check_structure(run: _Run, decoder: Decoder, name: str) -> None:
    last = len(decoder.layers) - 1
    if run.order != list(range(last + 1)):
        raise UnsupportedModelError(
            f"{name}: its decoder layers don't run once each, in order "
            f"(they ran as {run.order[:12]}...)."
        )
    shapes = {(tuple(h.shape), r is None) for h, r in run.outputs.values()}
    if len(shapes) != 1 or run.outputs[last][0].shape[-1] != decoder.hidden_size:
        raise UnsupportedModelError(
            f"{name}: its decoder layers don't all return one residual stream of "
            f"{decoder.hidden_size} columns (shapes: {sorted(s for s, _ in shapes)})."
        )


def _of_the_last(runs: Sequence[_Run], last: int, size: int, name: str) -> Convention:
    """Which reading of the last layer's return is the residual stream after it."""
    says = [answer for run in runs for answer in run.final_says]
    taken = verdict(says)
    if says and taken not in ("hidden", "hidden+residual"):
        raise UnsupportedModelError(
            f"{name}: what comes after its last decoder layer ({runs[0].final_name}) takes "
            "the pair that it is given neither as a state nor as a sum; its states would be a "
            "guess."
        )
    fitting: set[Convention] = {"hidden", "hidden+residual"}
    for run in runs:
        truth, source = _stream_after(run, taken, name)
        hidden, residual = run.outputs[last]
        if not truth[0].numel() == hidden.numel() == size:
            # Gemma3n: the layers return a stack of streams that is mixed into one afterwards.
            # Sequence parallelism: a rank has some of the rows.
            raise UnsupportedModelError(
                f"{name}: for {size // hidden.shape[-1]} tokens its decoder layers return "
                f"{tuple(hidden.shape)}, and {source} {tuple(truth[0].shape)}: not one "
                "residual stream; its states would be a guess."
            )
        fitting &= _readings(hidden, residual, [part.reshape(hidden.shape) for part in truth])
    if len(fitting) != 1:
        reason = (
            "its last decoder layer's residual is nothing in the trial forward, so that two "
            "readings of it agree"
            if fitting
            else f"neither what its last decoder layer returns, nor the sum of it, is {source}"
        )
        raise UnsupportedModelError(f"{name}: {reason}; its states would be a guess.")
    return fitting.pop()


def _stream_after(
    run: _Run, taken: Taken | None, name: str
) -> tuple[tuple[torch.Tensor, ...], str]:
    """The residual stream after the last layer, as terms of a sum; what it was read from."""
    if run.final is not None:
        first, *_ = run.final_given
        terms = run.final_given if taken == "hidden+residual" else (first,)
        return terms, f"what comes next ({run.final_name}) is given"
    # Some models (Step3.5) norm in compute_logits: then the model's output is the stream.
    output = hidden_of(run.model_output)
    if output.numel() == run.outputs[run.order[-1]][0].numel():
        return (output,), "what the model returns"
    raise UnsupportedModelError(
        f"{name}: nothing that is called after its last decoder layer takes a residual "
        "stream, so that what the layers return can't be held against anything."
    )


def _readings(
    hidden: torch.Tensor, residual: torch.Tensor | None, truth: Sequence[torch.Tensor]
) -> set[Convention]:
    """The readings of a layer's return that are ``truth``, to the rounding of one addition.

    Element by element: beside one massive activation all the others would be rounding.
    """
    readings: dict[Convention, tuple[torch.Tensor, ...]] = {"hidden": (hidden,)}
    if residual is not None:
        readings["hidden+residual"] = (hidden, residual)
    wanted = sum_of(truth)
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (*truth, hidden))
    fitting: set[Convention] = set()
    exact: set[Convention] = set()
    for reading, terms in readings.items():
        size = sum_of([term.abs() for term in terms])
        if bool(((sum_of(terms) - wanted).abs() <= 2 * eps * size).all()):
            fitting.add(reading)
            rounded = sum_of(terms).to(truth[0].dtype) if len(truth) == 1 else sum_of(terms)
            if torch.equal(rounded.double(), wanted):
                exact.add(reading)
    return exact if len(fitting) > 1 and len(exact) == 1 else fitting


def _finite(*tensors: torch.Tensor | None) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors if t is not None)


# --- running the model ----------------------------------------------------------------------


class _Asking:
    """The hooks of one run, and what they find."""

    def __init__(self, decoder: Decoder, remember: Remember, number: int) -> None:
        self.run = _Run()
        self._remember = remember
        self._number = number
        self._last = len(decoder.layers) - 1
        self._call = Call((), {})
        self._again: Again = contextlib.nullcontext

    def before_layer(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._call, self._again = Call.copied(args, kwargs), self._remember()

    def after_layer(self, index: int) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            returned = tuple(tensor.clone() for tensor in pair_of(output))
            outputs = self.run.outputs
            self.run.order.append(index)
            outputs[index] = returned[0], returned[1] if len(returned) > 1 else None
            hidden, residual = outputs.get(index - 1, (None, None))
            if hidden is None or residual is None:
                return
            places = places_of(self._call, hidden, residual, module)
            if places is not None:
                self.run.layers[index] = ask(
                    module, self._call, places, returned, self._again, self._number
                )

        return hook

    def before_other(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            run = self.run
            if self._last not in run.outputs or run.final is not None:
                return
            call = Call.copied(args, kwargs)
            places, given = list(call.tensors()), list(call.tensors().values())
            if not places:
                return
            run.final, run.final_name, run.final_given = module, name, (given[0],)
            pair = next((i for i in range(1, len(given)) if _alike(given[i], given[0])), None)
            if pair is None or given[0].numel() != run.outputs[self._last][0].numel():
                return
            run.final_given = given[0], given[pair]
            again = self._remember()
            with again():
                before = call.run(module, {})
            # The first alone: Cohere's norm ignores the residual and hands it through.
            where = places[0], places[pair]
            run.final_says = ask(module, call, where, before, again, self._number, count=1)

        return hook


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.size() != other.size():
        return False
    return bool(one.is_floating_point() and other.is_floating_point())


def _run(
    decoder: Decoder,
    forward: Callable[[int], Any],
    caching: Iterable[nn.Module],
    remember: Remember,
    number: int,
) -> _Run:
    asking = _Asking(decoder, remember, number)
    handles = []
    # A hook that stayed would slow down every later forward.
    try:
        for index, layer in enumerate(decoder.layers):
            handles += [
                layer.register_forward_pre_hook(asking.before_layer, with_kwargs=True),
                layer.register_forward_hook(asking.after_layer(index), with_kwargs=True),
            ]
        inside = set(decoder.layers.modules())
        for name, module in decoder.model.named_modules():
            if module not in inside:
                handles.append(
                    module.register_forward_pre_hook(
                        asking.before_other(name), with_kwargs=True
                    )
                )
        with silent(caching):
            asking.run.model_output = forward(number)
    finally:
        for handle in handles:
            handle.remove()
    return asking.run
