"""What the generator makes of the captured rows, in each of its two generations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..features import Features
from ..record import Patch, at

if TYPE_CHECKING:
    from ..batch import Batch


class _Rows:
    """The rows of one sequence and layer, as both generations read them.

    They copy (``.clone().cpu()``), because they hold views of a batch on a GPU. These rows
    are on the CPU, and nobody else's, so there is nothing to copy.
    """

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def clone(self) -> _Rows:
        return self

    def cpu(self) -> Any:
        return self._rows


class _Layer:
    """One layer of a batch; 0.3.0 cuts it into sequences by running offsets."""

    def __init__(self, batch: Batch, place: int, rows: list[list[Any]]) -> None:
        self._place = place
        self._rows = rows
        self._at = {}
        offset = 0
        for index, prompt in enumerate(batch.prompts):
            self._at[offset, offset + len(prompt)] = index
            offset += len(prompt)

    def __getitem__(self, part: slice) -> _Rows:
        index = self._at[part.start, part.stop]
        return _Rows(self._rows[index][self._place])


def as_generator_reads(batch: Batch, features: Features) -> Any:
    """The rows of a batch, as the installed generator takes them apart.

    Args:
        batch: all its rows have come.
        features: say which generation of the generator it is.
    """
    if features.results_by_offset:
        rows = [batch.result(index) for index in range(len(batch.prompts))]
        return [[_Layer(batch, place, rows) for place in range(len(batch.layer_ids))]]
    by_request = {
        request_id: batch.result(index) for index, request_id in enumerate(batch.request_ids)
    }
    if features.results_by_request:
        return {r: [_Rows(rows) for rows in layers] for r, layers in by_request.items()}
    return by_request


PATCHES = (
    Patch(
        name="results-by-offset",
        why="results are cut out of one tensor by running offsets, in scheduling order",
        upstream="speculators 0.3.0, generate(); speculators#279",
        delete_when="speculators 0.3.0 is no longer supported",
        needed=lambda look: look.generator_says("h[offset : offset + seq_len]"),
        speculators="<0.4",
        feature="results_by_offset",
    ),
    Patch(
        name="results-by-request",
        why="results are copied once more, tensor by tensor",
        upstream="speculators 0.4.0, generate()",
        delete_when="speculators 0.4.x is no longer supported",
        needed=lambda look: look.generator_says("request_states_dict[req_id]"),
        speculators=">=0.4",
        feature="results_by_request",
    ),
    Patch(
        name="results-in-order",
        why=(
            "results come in the order of sorted request-id strings: from 11 sequences on, "
            "result i is not input i, and scripts pair it with another sample's loss mask"
        ),
        upstream="speculators 0.4.0, generate(): for req_id in sorted(request_id_to_idx)",
        delete_when="speculators 0.4.x is no longer supported",
        needed=lambda look: look.generator_says("in sorted(request_id_to_idx.keys())"),
        speculators=">=0.4",
        # The ids are keys of a dict that was filled in the order of the inputs.
        replaces={at("sorted"): lambda original: list},
        discards=(at("sorted"),),
    ),
)
