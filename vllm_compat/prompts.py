"""Checks prompts before the scheduler sees them."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Mapping, Set
from typing import Any

from .errors import InvalidInputError

__all__ = ["check_layer_ids", "check_prompts"]


def check_prompts(token_ids: Any, vocabulary: int, max_len: int) -> list[list[int]]:
    """Turns a batch of prompts into lists of ints, each cut to ``max_len``.

    Args:
        token_ids: a list of sequences of ints, a list of 1-D tensors or arrays, or a 2-D
            tensor or array; any integer dtype.
        vocabulary: ids lie in ``range(vocabulary)``.
        max_len: longest prompt in tokens; longer ones are cut at the end.

    Raises:
        InvalidInputError: an empty batch or sequence, an id that is no integer or outside
            of the vocabulary. The message names the sequence and the position.
    """
    batch = _listed(token_ids, "the batch")
    if not batch:
        raise InvalidInputError("The batch is empty: there is no sequence in it.")
    prompts = []
    for index, sequence in enumerate(batch):
        ids = _listed(sequence, f"sequence {index}")
        if not ids:
            raise InvalidInputError(f"Sequence {index} is empty.")
        if set(map(type, ids)) != {int}:  # the usual case isn't looked at one by one
            ids = [_token(t, index, position) for position, t in enumerate(ids)]
        if min(ids) < 0 or max(ids) >= vocabulary:
            position = next(p for p, t in enumerate(ids) if not 0 <= t < vocabulary)
            raise InvalidInputError(
                f"Sequence {index}, position {position}: token id {ids[position]} is outside "
                f"of the vocabulary [0, {vocabulary - 1}]."
            )
        prompts.append(ids[:max_len])
    return prompts


def check_layer_ids(layer_ids: Any) -> list[int] | None:
    """Layer ids as a list of ints; None stays None.

    Raises:
        InvalidInputError: empty, or not integers. Whether they are in range is checked by
            the generator itself, which knows the model.
    """
    if layer_ids is None:
        return None
    ids = _listed(layer_ids, "layer_ids")
    if not ids:
        raise InvalidInputError("layer_ids is empty: name at least one layer.")
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise InvalidInputError(f"layer_ids: {reprlib.repr(value)} is not an integer.")
    return [int(value) for value in ids]


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, (str, bytes)):
        raise InvalidInputError(f"{what} is text; token ids are wanted.")
    if isinstance(value, (Set, Mapping)):
        order = ", which has no order" if isinstance(value, Set) else ""
        kind = f"{type(value).__name__}{order}"
        raise InvalidInputError(f"{what} is a {kind}; a sequence of token ids is wanted.")
    if hasattr(value, "tolist"):  # tensors and arrays: Python ints in one go
        value = value.tolist()
    try:
        return list(value)
    except TypeError as error:
        raise InvalidInputError(
            f"{what} is a {type(value).__name__}; a sequence of token ids is wanted."
        ) from error


def _token(value: Any, index: int, position: int) -> int:
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        # A 0-d tensor of an integer dtype is as good as an int.
        zero_d: Any = value
        item = zero_d.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(item, bool) or not isinstance(item, numbers.Integral):
            raise InvalidInputError(
                f"Sequence {index}, position {position}: {reprlib.repr(value)} is not an "
                "integer."
            )
        value = item
    return int(value)
