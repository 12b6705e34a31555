"""``verify``: holds the generator's states against those of transformers."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..activation import applied
from ..errors import UnsupportedModelError
from ..extract.ahead import check_model
from ..model_shape import ModelShape, default_layers, read_shape
from ..worker_environment import variables
from .comparison import as_json, listed, show
from .console import Console, human_bytes, only_results_on_stdout
from .errors import CommandError

if TYPE_CHECKING:
    from torch import Tensor

    from ..checks.rows import Comparison, Limits

__all__ = ["add"]

_DESCRIPTION = """\
Runs speculators' generator on vLLM and the same prompts through transformers, and shows how
far each row is off: by layer, and by position. Finds rows that belong to another position or
another prompt, and says to which.

  vllm-compat verify --model MODEL
  vllm-compat verify --model MODEL --layers 2 14 25 27 --prompts conversations.jsonl
  vllm-compat verify --model MODEL --plot errors.html
  vllm-compat verify --model MODEL --states training_data
  vllm-compat verify --model MODEL --batch-only

A right answer is off by the noise of two programs and two dtypes: 0.3 to 2 % on average, a few
per cent at the last layer. Exit status 0: every row is right; 1: some are not.

Where rope_scaling ("dynamic", "longrope") makes states depend on max_model_len, take that of
your run: --max-model-len N, or --states FOLDER for that of the files there.

--batch-only is for models that are too large for transformers here: the prompts run as one
batch and one by one, both on vLLM, and have to agree. That finds rows in the wrong place; it
doesn't find what vLLM itself would compute wrongly.
"""

_MAX_PROMPT = 4096
_MAX_MODEL_LEN = 2048  # the generator's default, and that of speculators' script

_QUIET = {
    # vLLM's and transformers' chatter is not what this command is asked for.
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    # vLLM on a CPU takes several GB otherwise, and no prompt here is long.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "verify",
        help="are the states those of the model? against transformers, row by row",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="checkpoint folder, or name on the hub")
    parser.add_argument(
        "--layers", type=int, nargs="+", metavar="K", help="default: the generator's own choice"
    )
    parser.add_argument(
        "--states",
        type=Path,
        metavar="FOLDER",
        help="with the layers and max_model_len of the run that wrote this folder",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="of your run, the script's --seq-length; prompts are cut to N - 1 tokens "
        "(default: 2048, as the generator's)",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line; or .jsonl/.json with input_ids, prompt, text, messages or "
        "conversations (default: 15 built-in ones of 1 to some hundred tokens)",
    )
    parser.add_argument("--max-prompts", type=int, metavar="N", help="only the first N of FILE")
    parser.add_argument(
        "--max-len", type=int, default=_MAX_PROMPT, metavar="N", help="cut prompts to N tokens"
    )
    parser.add_argument(
        "--reference-dtype",
        choices=("auto", "float32", "bfloat16", "checkpoint"),
        default="auto",
        help="of transformers; auto: float32 if it fits into memory, else the checkpoint's own",
    )
    parser.add_argument("--reference-device", default="cpu", help="of transformers, e.g. cuda")
    parser.add_argument("--batch-only", action="store_true", help="without transformers")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.8, metavar="SHARE")
    parser.add_argument(
        "--mean-limit",
        type=float,
        metavar="X",
        help="largest mean error of a layer's rows in a prompt (default: 0.08)",
    )
    parser.add_argument(
        "--row-limit", type=float, metavar="X", help="largest error of a row (default: 0.4)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="picture of the errors, .html or .png"
    )
    parser.add_argument("--json", action="store_true", help="plain values in place of tables")
    parser.set_defaults(function=_run)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.plot is not None:
        from ..checks.plot import check_path

        try:
            check_path(parsed.plot)
        except ValueError as error:
            raise CommandError(str(error)) from error
    notes = Console(sys.stderr)
    with only_results_on_stdout(), variables(_QUIET, unless_set=True), applied():
        comparison, facts = _compare(parsed, notes)
    if parsed.plot is not None:
        from ..checks.plot import write_plot

        write_plot(comparison, parsed.plot, f"{Path(parsed.model).name}: {facts['against']}")
    if parsed.json:
        sys.stdout.write(json.dumps(as_json(comparison, facts), indent=1) + "\n")
    else:
        show(comparison, facts, Console())
    return 1 if comparison.wrong else 0


def _compare(parsed: argparse.Namespace, notes: Console) -> tuple[Comparison, dict[str, Any]]:
    _as_the_run(parsed)
    check_model(parsed.model)
    model = read_shape(parsed.model)
    layer_ids = _layers(parsed.layers, model.layers)
    max_model_len = parsed.max_model_len
    if max_model_len is None:
        max_model_len = min(_MAX_MODEL_LEN, model.positions or _MAX_MODEL_LEN)
    elif max_model_len < 2:
        raise CommandError(f"--max-model-len {max_model_len}: at least 2 is needed.")
    prompts = _prompts(parsed, model, max_model_len)
    dtype = None if parsed.batch_only else _reference_dtype(parsed)
    tokens = sum(map(len, prompts))
    what = f"{len(prompts)} prompts, {tokens} tokens, layers {listed(layer_ids)}"
    notes.line(f"vLLM: {what} ...", style="dim")
    began = time.monotonic()
    got, alone, rope = _generate(parsed, layer_ids, prompts, max_model_len)
    seconds = time.monotonic() - began
    facts = {
        "model": parsed.model,
        "layers": layer_ids,
        "prompts": len(prompts),
        "tokens": tokens,
        "max_model_len": max_model_len,
        "rope": rope["note"] if rope else None,
        "vllm_seconds": round(seconds, 1),
    }
    if parsed.batch_only:
        facts["against"] = "one batch against one by one"
        reference = alone
    else:
        name = str(dtype).removeprefix("torch.")
        facts["against"] = f"vLLM against transformers ({name})"
        length = _rope_length(rope)
        if length is not None:
            facts["against"] += f" with the rotary embedding of {length} tokens"
        notes.line(f"transformers: {name}, on {parsed.reference_device} ...", style="dim")
        began = time.monotonic()
        try:
            reference = _reference(parsed, layer_ids, prompts, dtype, length, notes)
        except UnsupportedModelError as error:
            if rope is None:
                raise
            raise _undecidable(rope, f" {error}") from error
        facts["reference_seconds"] = round(time.monotonic() - began, 1)
    from ..checks.rows import compare

    return compare(got, reference, layer_ids, _limits(parsed)), facts


def _limits(parsed: argparse.Namespace) -> Limits:
    from ..checks.rows import Limits

    given = {"mean": parsed.mean_limit, "row": parsed.row_limit}
    return Limits(**{name: value for name, value in given.items() if value is not None})


def _rope_length(rope: dict[str, Any] | None) -> int | None:
    """The length at which transformers has vLLM's rotary embedding; None: at each prompt's."""
    if rope is None:
        return None
    if rope["length"] is None:
        raise _undecidable(rope)
    return int(rope["length"])


def _undecidable(rope: dict[str, Any], why: str = "") -> CommandError:
    return CommandError(
        f"can't be decided: {rope['note']}{why} There is no reference for these states; "
        "--batch-only finds rows in the wrong place."
    )


def _as_the_run(parsed: argparse.Namespace) -> None:
    """Takes what isn't given from the folder that a run wrote."""
    folder = parsed.states
    if folder is None:
        return
    # manifest.json is of `extract`, and there from the beginning; the other of speculators.
    for name, *inside in (("manifest.json", "settings", "settings"),
                          ("data_config.json", "data", "hidden_states")):  # fmt: skip
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            length, layers = (config[part] for part in inside)
            length, layers = int(length["seq_length"]), [int(k) for k in layers["layer_ids"]]
        except OSError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(
                f"{folder / name} doesn't say seq_length and layer_ids ({error!r})."
            ) from error
        parsed.max_model_len = parsed.max_model_len or length
        parsed.layers = parsed.layers or layers
        return
    raise CommandError(f"{folder} has neither manifest.json nor data_config.json.")


def _layers(asked: list[int] | None, count: int) -> list[int]:
    layer_ids = list(default_layers(count) if asked is None else dict.fromkeys(asked))
    outside = [k for k in layer_ids if not 0 <= k < count]
    if outside:
        raise CommandError(
            f"layer {outside[0]} is outside of [0, {count - 1}]: the model has {count} layers."
        )
    return layer_ids


def _prompts(
    parsed: argparse.Namespace, model: ModelShape, max_model_len: int
) -> list[list[int]]:
    from transformers import AutoTokenizer

    from .prompts import built_in_prompts, read_prompts

    try:
        tokenizer = AutoTokenizer.from_pretrained(parsed.model, trust_remote_code=True)
    except (OSError, ValueError) as error:
        sentence = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CommandError(f"can't load the tokenizer of {parsed.model}: {sentence}") from error
    # vLLM keeps one position for the token that it has to generate.
    longest = min(parsed.max_len, max_model_len - 1)
    if parsed.prompts is None:
        return built_in_prompts(tokenizer, model.vocabulary or len(tokenizer), longest)
    return read_prompts(parsed.prompts, tokenizer, longest)[: parsed.max_prompts]


def _reference_dtype(parsed: argparse.Namespace) -> Any:
    import torch

    from ..checks.reference import checkpoint_bytes, checkpoint_itemsize
    from .machine import memory

    folder = Path(parsed.model)
    size, itemsize = checkpoint_bytes(folder), checkpoint_itemsize(folder)
    own = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32}.get(itemsize, torch.float32)
    if parsed.reference_dtype == "float32":
        return torch.float32
    if parsed.reference_dtype == "bfloat16":
        return torch.bfloat16
    if parsed.reference_dtype == "checkpoint":
        return own
    if not size or parsed.reference_device != "cpu":
        return own if parsed.reference_device != "cpu" else torch.float32
    available = 0.9 * memory().available
    if size / itemsize * 4 < available:
        return torch.float32
    if size < available:
        return own
    raise CommandError(
        f"transformers needs {human_bytes(size)} of memory for this model, and "
        f"{human_bytes(available)} can be had: use --batch-only."
    )


def _generate(
    parsed: argparse.Namespace,
    layer_ids: Sequence[int],
    prompts: list[list[int]],
    max_model_len: int,
) -> tuple[list[list[Tensor]], list[list[Tensor]], dict[str, Any] | None]:
    """States of all prompts in one batch; if wanted, of each alone; what the workers say of
    their rotary embedding."""
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    from .. import status

    generator = VllmHiddenStatesGenerator(
        parsed.model,
        layer_ids=list(layer_ids),
        max_model_len=max_model_len,
        tensor_parallel_size=parsed.tensor_parallel_size,
        gpu_memory_utilization=parsed.gpu_memory_utilization,
    )
    try:
        rope = next((w["rope"] for w in status().workers if "rope" in w), None)
        together = [r["hidden_states"] for r in generator.generate(prompts)]
        alone = []
        if parsed.batch_only:
            alone = [generator.generate([p])[0]["hidden_states"] for p in prompts]
    finally:
        # Its memory is wanted for the reference.
        generator.executor.shutdown()
    return together, alone, rope


def _reference(
    parsed: argparse.Namespace,
    layer_ids: Sequence[int],
    prompts: list[list[int]],
    dtype: Any,
    rope_length: int | None,
    notes: Console,
) -> list[list[Tensor]]:
    from ..checks.reference import transformers_states

    states = transformers_states(
        parsed.model, layer_ids, dtype, parsed.reference_device, rope_length
    )
    found = []
    with notes.progress(sum(map(len, prompts)), "transformers, tokens") as advance:
        for prompt in prompts:
            found.append(states(prompt))
            advance(len(prompt))
    return found
