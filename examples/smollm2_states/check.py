"""Check files of hidden states against transformers, row by row.

Every sample goes through the model once more, alone, in transformers; forward hooks
on the decoder layers give the states that the files ought to hold. A row is the
state of one token at one layer. Its error is the length of the difference over the
length of the reference, ``|got - want| / |want|``. The limits, and what they rest on,
are those of vllm_compat.checks.rows; they were measured on this demo. The reference is
made here, with nothing of the code that captures the states in vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_compat.checks.rows import Limits, compare_rows

if TYPE_CHECKING:
    from torch import Tensor

LIMITS = Limits()

Reference = Callable[["Tensor"], list["Tensor"]]


@dataclass
class Layer:
    """Largest errors at one layer: of a sample (average of its rows) and of a row."""

    layer_id: int
    sample_error: float = 0.0
    row_error: float = 0.0
    row: str = ""


@dataclass
class Outcome:
    """What was found; `wrong` has a sentence for each fault and is empty if all is right."""

    layers: list[Layer]
    samples: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)


def transformers_reference(model: Path, layer_ids: Sequence[int]) -> Reference:
    """States after the decoder layers `layer_ids`, [n, hidden] each, for int64 ids [n].

    Layer k means the residual stream after decoder layer k, before the final norm. The
    hidden states that transformers returns have the norm applied for the last layer,
    hence the hooks.
    """
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    layers = network.get_decoder().layers
    seen: dict[int, Tensor] = {}

    def keep(layer_id: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _arguments: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            seen[layer_id] = states[0]

        return hook

    for layer_id in set(layer_ids):
        layers[layer_id].register_forward_hook(keep(layer_id))

    def reference(input_ids: Tensor) -> list[Tensor]:
        seen.clear()
        with torch.inference_mode():
            network(input_ids[None], use_cache=False, logits_to_keep=1)
        return [seen[layer_id] for layer_id in layer_ids]

    return reference


def check_directory(
    directory: Path,
    samples: Sequence[dict[str, Any]],
    layer_ids: Sequence[int],
    reference: Reference,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Outcome:
    """Compare data_{i}.pt with sample i (its input_ids and loss_mask) and the reference."""
    outcome = Outcome([Layer(layer_id) for layer_id in layer_ids])
    config = read_config(directory)
    if config is None:
        outcome.wrong.append("data_config.json is missing or can't be read")
    elif config["hidden_states"]["layer_ids"] != list(layer_ids):
        outcome.wrong.append(
            f"data_config.json names layers {config['hidden_states']['layer_ids']}, "
            f"not {list(layer_ids)}"
        )
    expected = {f"data_{index}.pt" for index in range(len(samples))}
    for name in sorted({file.name for file in directory.glob("data_*.pt")} - expected):
        outcome.wrong.append(f"{name} belongs to no sample")
    for index, sample in enumerate(samples):
        outcome.wrong += check_file(directory / f"data_{index}.pt", sample, reference, outcome)
        progress(len(sample["input_ids"]))
    return outcome


def check_file(
    file: Path, sample: dict[str, Any], reference: Reference, outcome: Outcome
) -> list[str]:
    """Faults of one file; the largest errors are noted in `outcome`."""
    import torch

    try:
        data = torch.load(file, weights_only=True)
    except FileNotFoundError:
        return [f"{file.name} is missing"]
    except Exception as error:  # a file that is cut fails in many ways
        return [f"{file.name} can't be read: {type(error).__name__}"]
    if not isinstance(data, dict) or set(data) != {"input_ids", "hidden_states", "loss_mask"}:
        return [f"{file.name} doesn't hold input_ids, hidden_states and loss_mask"]

    ids, states, mask = data["input_ids"], data["hidden_states"], data["loss_mask"]
    # The generator keeps one position for the token that vLLM has to generate.
    length = len(ids)
    if length not in (len(sample["input_ids"]), len(sample["input_ids"]) - 1):
        return [f"{file.name} has {length} ids of {len(sample['input_ids'])}"]
    if not torch.equal(ids, sample["input_ids"][:length]):
        return [f"{file.name} holds the ids of another sample"]
    wrong = []
    if not torch.equal(mask, sample["loss_mask"][:length]):
        wrong.append(f"{file.name} holds another loss mask")
    if len(states) != len(outcome.layers):
        return [*wrong, f"{file.name} has {len(states)} layers, not {len(outcome.layers)}"]

    for layer, got, want in zip(outcome.layers, states, reference(ids), strict=True):
        place = f"{file.name}, layer {layer.layer_id}"
        if got.shape != want.shape or got.dtype != want.dtype:
            wrong.append(
                f"{place}: {got.dtype} {list(got.shape)} in place of "
                f"{want.dtype} {list(want.shape)}"
            )
            continue
        errors, nearest, ratios = compare_rows(got, want)
        # Written so that NaN is wrong: it is neither smaller nor larger than a limit.
        for position in (~(errors < LIMITS.row)).nonzero().flatten().tolist():
            text = f"{place}, position {position}: {100 * float(errors[position]):.1f} % off"
            if ratios[position] > LIMITS.nearer:
                text += f"; it is the row of position {int(nearest[position])}"
            wrong.append(text)
        for position in (
            ((ratios > LIMITS.nearer) & (errors < LIMITS.row)).nonzero().flatten().tolist()
        ):
            wrong.append(
                f"{place}, position {position}: it is the row of position "
                f"{int(nearest[position])}, {float(ratios[position]):.0f} times nearer"
            )
        mean = float(errors.mean())
        if not mean < LIMITS.mean:
            wrong.append(f"{place}: rows are {100 * mean:.1f} % off on average")
        if not mean <= layer.sample_error:
            layer.sample_error = mean
        worst = int(errors.nan_to_num(nan=float("inf")).argmax())
        if not float(errors[worst]) <= layer.row_error:
            layer.row_error = float(errors[worst])
            layer.row = f"{file.name}[{worst}]"
    outcome.samples += 1
    outcome.tokens += length
    return wrong


def read_config(directory: Path) -> dict[str, Any] | None:
    try:
        config = json.loads((directory / "data_config.json").read_text())
        config["hidden_states"]["layer_ids"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return config  # type: ignore[no-any-return]


def print_outcome(outcome: Outcome, shown: int = 20) -> None:
    """The table, and the first faults if there are any."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("layer", title="Largest errors against transformers", title_justify="left")
    for column in ("samples", "tokens", "worst sample", "worst row"):
        table.add_column(column, justify="right")
    table.add_column("which")
    for layer in outcome.layers:
        table.add_row(
            str(layer.layer_id),
            str(outcome.samples),
            str(outcome.tokens),
            f"{100 * layer.sample_error:.2f} %",
            f"{100 * layer.row_error:.2f} %",
            layer.row,
        )
    console.print(table)
    for sentence in outcome.wrong[:shown]:
        console.print("wrong: " + sentence, markup=False)
    if len(outcome.wrong) > shown:
        console.print(f"... and {len(outcome.wrong) - shown} more")
