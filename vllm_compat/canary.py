"""The canary: now and then one sequence of a batch is computed again, alone, and compared.

The account of rows (:mod:`vllm_compat.batch`) proves which token and position a row was
computed for. It can't see that vLLM computed it from something else than its tokens: from what
another request left in a block, say. Such a row depends on what went before, so it doesn't come
out the same a second time.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .errors import CaptureError

if TYPE_CHECKING:
    import torch

__all__ = ["Canary"]

log = logging.getLogger("vllm_compat")

_VARIABLE = "VLLM_COMPAT_CANARY"
_TOLERANCE = 0.25
"""Of a row's length. Two right computations in bf16 are 1 to 5 % apart, rows of different
tokens 20 to 150 %. It is the median row that counts: where a router has to choose between
experts with nearly equal scores, another composition of the batch moves single rows by more."""
_FIRST_BATCHES = 3
_OTHERS = 7  # sequences that settle a doubt
_ROWS = 256  # of a sequence; the rest of a long one adds nothing to a median

States = Sequence["torch.Tensor"]
"""One tensor [tokens, hidden_size] for each layer asked for."""


class Canary:
    """Of one generator.

    Args:
        share: of the time of all batches, at most, on average.
        recurrent: the model carries states from token to token. Then its first batches are
            looked at in any case: such states are what has gone stale so far.
    """

    def __init__(self, share: float, recurrent: bool) -> None:
        self._share = share
        self._first = _FIRST_BATCHES if recurrent and share else 0
        self._batches = self._looks = self._unseen = 0
        self._watched = self._spent = 0.0  # seconds
        self._cost = float("inf")
        self._doubt = False  # the last look didn't end well: the next batch is looked at too

    def look(
        self,
        prompts: Sequence[Sequence[int]],
        states: Sequence[States],
        seconds: float,
        compute: Callable[[list[int]], States],
    ) -> None:
        """After a batch: computes one of its sequences again, if it is time for it.

        Args:
            prompts: token ids of each sequence of the batch.
            states: what came out for each.
            seconds: how long the batch took.
            compute: gives the states of one sequence, computed alone.

        Raises:
            CaptureError: the states are not those of their tokens.
        """
        self._batches += 1
        self._unseen += 1
        self._watched += seconds
        if not self._looks:
            # Nothing was measured yet. One sequence takes no longer than a batch.
            self._cost = min(self._cost, seconds)
        in_time = self._spent + self._cost <= self._share * self._watched
        due = self._batches <= self._first or self._doubt or (self._share and in_time)
        if not due:
            return
        began, self._doubt = time.monotonic(), True
        try:
            self._compare(prompts, states, compute)
        finally:
            self._cost = time.monotonic() - began
            self._spent += self._cost
            self._looks += 1
        self._unseen, self._doubt = 0, False

    def _compare(
        self,
        prompts: Sequence[Sequence[int]],
        states: Sequence[States],
        compute: Callable[[list[int]], States],
    ) -> None:
        by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        chosen = by_length[0]
        if self._looks % 2:  # the same ones for the same data
            shorter = by_length[: len(by_length) // 2 + 1]
            chosen = random.Random(self._looks).choice(shorter)
        again = compute(list(prompts[chosen]))
        off = difference(states[chosen], again)
        log.debug("vllm-compat: sequence %d, computed again: off by %.2g.", chosen, off)
        if off <= _TOLERANCE:
            return
        # A doubt, which other evidence has to settle.
        what = f"Sequence {chosen} ({len(prompts[chosen])} tokens)"
        third = difference(again, compute(list(prompts[chosen])))
        if third > _TOLERANCE:
            raise CaptureError(
                f"{what}: computed again alone, its states are off by {off:.0%} (median row), "
                f"and by another {third:.0%} when computed once more. {self._so}"
            )
        others = [index for index in by_length if index != chosen][:_OTHERS]
        wrong = sum(
            difference(states[index], compute(list(prompts[index]))) > _TOLERANCE
            for index in others
        )
        if 2 * (wrong + 1) > len(others) + 1:
            raise CaptureError(
                f"{what}: computed again alone, its states are off by {off:.0%} (median row), "
                f"and so are those of {wrong} of {len(others)} other sequences. {self._so}"
            )
        log.warning(
            "vllm-compat: %s: computed again alone, its states are off by %.0f %% (median "
            "row); so are those of %d of %d other sequences. A mixture of experts can do "
            "that to a short sequence by itself; another model should not.",
            what, off * 100, wrong, len(others),
        )  # fmt: skip

    @property
    def _so(self) -> str:
        unseen = self._unseen - 1
        more = f", nor the {unseen} before it that were not checked" if unseen else ""
        return (
            "vLLM computes them from something else than their tokens, most likely from what "
            f"an earlier request left in its cache. Don't use the states of this batch{more}. "
            f"(docs/correctness.md, the canary; {_VARIABLE}=0 switches this check off.)"
        )


def difference(first: States, second: States) -> float:
    """How far the states of a sequence are apart: its median row, in the layer that is worst.

    Of a row's length, as in ``|first - second| / |second|``.
    """
    return max(map(_median_row, first, second))


def _median_row(first: torch.Tensor, second: torch.Tensor) -> float:
    step = -(-len(first) // _ROWS)
    a, b = first[::step].float(), second[::step].float()
    lengths = b.norm(dim=-1).clamp_min(1e-30)
    return float(((a - b).norm(dim=-1) / lengths).median())
