"""Runs a vLLM model on a few tokens, before there is a KV cache.

As vLLM's own profiling run does it: without attention metadata, so that attention layers, KV
connectors and state-space layers neither read nor write what outlives the run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn

__all__ = ["RUNS", "TOKENS", "Trial", "choose_tokens", "remember", "silent"]

RUNS = 2
"""How often the model is run, on other tokens each time."""

TOKENS = 8
"""Tokens of one run."""

# Ids whose embeddings are looked at together. Some models keep what they embed in a buffer of
# as many rows as a step may have.
_AT_ONCE = 256


class Trial:
    """A model and the tokens that it is tried on.

    The tokens are chosen by what the embedding gives: rows of zeros (reserved and untrained
    ids, padding) would show nothing, and rows that are far from the usual size little.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model = model
        self._config = vllm_config
        vocabulary = vllm_config.model_config.get_vocab_size()
        ids = choose_tokens(_embedding_of(model), vocabulary, RUNS * TOKENS, device)
        self._ids = ids.view(RUNS, TOKENS)

    def __call__(self, number: int = 0) -> Any:
        """One forward on the tokens of the run of this number."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        config, input_ids = self._config, self._ids[number]
        positions = torch.arange(TOKENS, dtype=torch.int64, device=input_ids.device)
        # One row for each axis; on text they agree. HunYuan-VL has a rope of its own kind.
        if config.model_config.uses_mrope:
            positions = positions.repeat(3, 1)
        elif axes := getattr(config.model_config, "uses_xdrope_dim", 0):
            positions = positions.repeat(axes, 1)
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=TOKENS),
        ):
            return self._model(
                input_ids=input_ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )


def remember() -> Callable[[], AbstractContextManager[Any]]:
    """Keeps vLLM's forward context as it is; opens a copy of it, each time it is called.

    The context counts calls. Where a mixture-of-experts layer is a custom operator (CUDA; from
    vLLM 0.17 on also called as a function on a CPU), it takes its name from there: 0.15.0
    pops it from ``remaining_moe_layers``, 0.15.1 and later read ``all_moe_layers`` and advance
    ``moe_layer_index`` (vllm/forward_context.py), unless torch is 2.11 or newer, where the
    name travels as an object. Run twice in one context, a layer would get the experts of a
    later one, and the last layers none.
    """
    from vllm.forward_context import get_forward_context, override_forward_context

    began = _copied(get_forward_context())
    return lambda: override_forward_context(_copied(began))


def _copied(context: Any) -> Any:
    new = copy.copy(context)
    for name, value in vars(context).items():
        if isinstance(value, (list, dict)):
            setattr(new, name, value.copy())
    return new


def choose_tokens(
    embed: Callable[[torch.Tensor], torch.Tensor] | None,
    vocabulary: int,
    count: int,
    device: torch.device,
) -> torch.Tensor:
    """Token ids that show something. [count], int64

    Args:
        embed: ids [n] to embeddings [n, width]; None if the model has no such function.
        vocabulary: number of token ids.
        count: how many are wanted. Ids repeat where fewer have an embedding that is not zero.
        device: of the ids.
    """
    some = torch.arange(min(count, vocabulary), dtype=torch.int64, device=device)
    # Over the whole vocabulary, but not token 0: often the padding token.
    spread = (some * (vocabulary // count or 1) + 3) % vocabulary
    ids = spread[:0]
    if embed is not None:
        # Not every model's function can be called with ids alone.
        with suppress(Exception):
            ids = _telling(embed, vocabulary, count, device)
    ids = ids if len(ids) else spread
    return ids.repeat(-(-count // len(ids)))[:count]


def _telling(
    embed: Callable[[torch.Tensor], torch.Tensor],
    vocabulary: int,
    count: int,
    device: torch.device,
) -> torch.Tensor:
    """Up to ``count`` ids with different embeddings that are not zero, of the usual size."""
    found: list[int] = []
    seen: list[torch.Tensor] = []
    for ids in _samples(vocabulary, device):
        rows = embed(ids).reshape(len(ids), -1).double()
        sizes = torch.linalg.vector_norm(rows, dim=-1)
        useful = (sizes > 0) & sizes.isfinite()
        if not useful.any():
            continue
        distance = (sizes / sizes[useful].median()).log().abs()
        distance = torch.where(useful, distance, torch.inf)
        for place in distance.argsort(stable=True)[: int(useful.sum())].tolist():
            # Untrained ids often share one embedding.
            if not any(torch.equal(rows[place], row) for row in seen):
                seen.append(rows[place])
                found.append(int(ids[place]))
            if len(found) == count:
                return torch.tensor(found, dtype=torch.int64, device=device)
    return torch.tensor(found, dtype=torch.int64, device=device)


def _samples(vocabulary: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The ids of the vocabulary in groups, each from all over it."""
    groups = -(-vocabulary // _AT_ONCE)
    for first in range(groups):
        yield torch.arange(first, vocabulary, groups, dtype=torch.int64, device=device)


def _embedding_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The model's own function; its name is another one before vLLM 0.12."""
    for name in ("embed_input_ids", "get_input_embeddings"):
        function = getattr(model, name, None)
        if callable(function):
            return function  # type: ignore[no-any-return]
    return None


@contextmanager
def silent(modules: Iterable[nn.Module]) -> Iterator[None]:
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
