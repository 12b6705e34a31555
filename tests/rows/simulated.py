"""What a worker would send, made up without any of the code under test.

Every row has a value that says whose it is (sequence, layer, position), so that a row in a
wrong place is seen in the result itself. A scheduler step is a plain list of (sequence,
position), one entry a row; the messages are cut out of that list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from vllm_compat.transport.messages import Kind, Message, Segment

WIDTH = 5
DTYPE = torch.bfloat16
VOCABULARY = 1000

Sent = tuple[Message, Any]
"""A message and its payload."""


def value(sequence: int, layer: int, position: int) -> list[float]:
    """The row; small integers, which bfloat16 holds exactly."""
    return [sequence % 200, layer, position % 200, position // 200, sequence // 200]


def truth(sequence: int, layer: int, length: int) -> torch.Tensor:
    """All rows of one sequence and layer."""
    return torch.tensor([value(sequence, layer, p) for p in range(length)], dtype=DTYPE)


@dataclass
class Case:
    """A batch, and the steps in which it is computed."""

    prompts: list[list[int]]
    layer_ids: list[int]
    steps: list[list[tuple[int, int]]]
    """Of each step: (sequence, position) of each row, in order."""
    first_step: int = 1
    restarts: int = 0
    pieces: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Of a step and a layer: at which rows its block is cut."""

    @property
    def layers(self) -> list[int]:
        return sorted(set(self.layer_ids))

    def name(self, sequence: int) -> str:
        return f"req_7_{sequence}"

    def segments(self, step: int) -> list[Segment]:
        found: list[Segment] = []
        for sequence, position in self.steps[step]:
            last = found[-1] if found else None
            if last is not None and last.request_id == self.name(sequence):
                found[-1] = replace(last, count=last.count + 1)
            else:
                found.append(Segment(self.name(sequence), position, 1))
        return found

    def sent(self, payload: Callable[[torch.Tensor], Any] = torch.clone) -> list[Sent]:
        """All messages, in order.

        Args:
            payload: makes what carries a tensor: itself, or its bytes.
        """
        messages: list[Sent] = []
        for index, rows in enumerate(self.steps):
            number = self.first_step + index
            messages.append((Message.of_segments(number, self.segments(index)), None))
            given = (
                (Kind.POSITIONS, [p for _, p in rows]),
                (Kind.TOKENS, [self.prompts[s][p] for s, p in rows]),
            )
            for kind, numbers in given:
                tensor = torch.tensor(numbers)
                messages.append((Message(kind, number, rows=len(rows)), payload(tensor)))
            for layer in self.layers:
                tensor = torch.tensor([value(s, layer, p) for s, p in rows], dtype=DTYPE)
                cuts = self.pieces.get((index, layer), [])
                edges = [0, *cuts, len(rows)]
                for kind, whole in (
                    (Kind.NORMS, tensor.float().abs().amax(-1)),
                    (Kind.ROWS, tensor),
                ):
                    for low, high in pairwise(edges):
                        part = whole[low:high].clone()
                        message = Message(kind, number, layer, low, high - low)
                        messages.append((message, payload(part)))
            messages.append((Message(Kind.END, number), None))
        return messages


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """What a tensor looks like in shared memory."""
    raw = bytearray(tensor.numel() * tensor.element_size())
    torch.frombuffer(raw, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return memoryview(raw)


@st.composite
def cases(draw: st.DrawFn, restarts: bool = True) -> Case:
    """Batches with chunked prompts, any order of rows, and preemption."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    prompts = [
        draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n)) for n in lengths
    ]
    layer_ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    case = Case(prompts, layer_ids, [], draw(st.integers(1, 1000)))
    reached = [0] * len(lengths)
    while any(r < n for r, n in zip(reached, lengths, strict=True)):
        open_ = [i for i, n in enumerate(lengths) if reached[i] < n]
        # Running requests can lose their KV blocks: they start over in a later step.
        if restarts and case.restarts < 4:
            for sequence in [i for i in open_ if reached[i] > 0]:
                if draw(st.integers(0, 5)) == 0:
                    reached[sequence] = 0
                    case.restarts += 1
        chosen = draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        rows: list[tuple[int, int]] = []
        for sequence in chosen:
            count = draw(st.integers(1, lengths[sequence] - reached[sequence]))
            rows += [(sequence, reached[sequence] + i) for i in range(count)]
            reached[sequence] += count
        for layer in case.layers:
            if len(rows) > 1 and draw(st.booleans()):
                case.pieces[len(case.steps), layer] = sorted(
                    draw(st.sets(st.integers(1, len(rows) - 1), max_size=3))
                )
        case.steps.append(rows)
    return case


def find(sent: Sequence[Sent], kind: int) -> list[int]:
    """Where the messages of a kind are."""
    return [i for i, (message, _) in enumerate(sent) if message.kind == kind]
