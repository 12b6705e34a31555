"""``vllm-compat extract``."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from ..cli.numbers import at_least, fraction
from ..worker_environment import variables
from .errors import ExtractError
from .plan import check_part

__all__ = ["add"]

_DESCRIPTION = """\
Writes hidden states of conversations: the files of speculators' data_generation_offline.py,
with one generator or many.

  vllm-compat extract --model MODEL --data chats.jsonl --output states
  vllm-compat extract --model MODEL --data chats.jsonl --output states --replicas 8

Stopped in whatever way, the same command goes on where it was. More than one replica needs Ray
(pip install 'vllm-compat[ray]'); --shard does without. docs/scaling.md is the how-to.
"""

_SHOWN = 5  # names in the summary; manifest.json has more

# Read by the libraries when they are imported. Their lines would drown what is said here.
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "extract",
        help="conversations to files of hidden states, on one device or many",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # The second names are those of speculators' script.
    parser.add_argument("--model", "--target-model-path", required=True, metavar="MODEL")
    parser.add_argument(
        "--data",
        "--train-data-path",
        required=True,
        metavar="DATA",
        help="conversations: a .json or .jsonl file, or a data set that speculators knows",
    )
    parser.add_argument(
        "--output", "--output-dir", required=True, metavar="DIR", help="for data_0.pt and so on"
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--replicas", type=at_least(1), default=1, metavar="N", help="generators (default: 1)"
    )
    where.add_argument(
        "--tensor-parallel-size",
        type=at_least(1),
        default=1,
        metavar="T",
        help="GPUs of each generator (default: 1)",
    )
    where.add_argument(
        "--cpus-per-replica",
        type=at_least(1),
        metavar="C",
        help="CPU cores of each generator (default on a CPU: the cores, shared out)",
    )
    where.add_argument(
        "--address", metavar="RAY", help="of a Ray cluster, or auto (default: a Ray of its own)"
    )
    where.add_argument(
        "--executor",
        choices=("mp", "ray"),
        default="mp",
        help="vLLM's executor; ray spreads one generator over several machines",
    )
    where.add_argument(
        "--gpu-memory-utilization", type=fraction, default=0.8, metavar="F", help="default: 0.8"
    )
    what = parser.add_argument_group("what is computed")
    what.add_argument(
        "--layers",
        "--layer-ids",
        type=at_least(0),
        nargs="+",
        metavar="K",
        help="states after decoder layer K (default: the generator's choice)",
    )
    what.add_argument(
        "--seq-length",
        type=at_least(2),
        default=2048,
        metavar="L",
        help="tokens at most (default: 2048)",
    )
    what.add_argument(
        "--batch-size",
        type=at_least(1),
        default=8,
        metavar="B",
        help="samples a batch (default: 8)",
    )
    what.add_argument("--max-samples", type=at_least(1), metavar="M", help="only so many")
    what.add_argument(
        "--shard", type=_shard, metavar="I/N", help="part I of N, from 0; instead of Ray"
    )
    what.add_argument("--start", type=at_least(0), metavar="I", help="first sample of this run")
    what.add_argument("--end", type=at_least(1), metavar="I", help="one past the last")
    what.add_argument(
        "--retry-failed", action="store_true", help="try samples that failed once more"
    )
    what.add_argument(
        "--mixed-versions",
        action="store_true",
        help="go on in a folder that other versions of vLLM and the like have begun",
    )
    what.add_argument(
        "--ignore-free-space",
        action="store_true",
        help="begin though the disk is too small for all of it (it is emptied meanwhile)",
    )
    data = parser.add_argument_group("preprocessing, as in speculators' script")
    data.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    data.add_argument(
        "--token-freq-path",
        metavar="FILE",
        help="token frequencies (default: token_freq.torch in the output folder; a name in "
        '"pt" would be a sample for training there)',
    )
    data.add_argument("--hf-cache-dir", metavar="DIR")
    data.add_argument("--assistant-pattern", metavar="REGEX")
    data.add_argument("--turn-dropout", action="store_true")
    data.add_argument(
        "--preprocessing-workers", "--num-preprocessing-workers", type=at_least(1), metavar="P"
    )
    parser.set_defaults(function=run, usage_error=parser.error)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    try:
        return int(part), int(parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0/8") from None


def run(parsed: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    try:
        check_part(parsed.start, parsed.end, parsed.shard)
    except ExtractError as error:
        parsed.usage_error(str(error))
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from ..cli.console import only_results_on_stdout
    from .run import extract

    try:
        with only_results_on_stdout(), variables(_QUIET, unless_set=True):
            summary = extract(
                parsed.model,
                parsed.data,
                parsed.output,
                replicas=parsed.replicas,
                tensor_parallel_size=parsed.tensor_parallel_size,
                address=parsed.address,
                layer_ids=parsed.layers,
                seq_length=parsed.seq_length,
                batch_size=parsed.batch_size,
                max_samples=parsed.max_samples,
                start=parsed.start,
                end=parsed.end,
                shard=parsed.shard,
                seed=parsed.seed,
                gpu_memory_utilization=parsed.gpu_memory_utilization,
                cpus_per_replica=parsed.cpus_per_replica,
                executor=parsed.executor,
                token_freq_path=parsed.token_freq_path,
                cache_dir=parsed.hf_cache_dir,
                assistant_pattern=parsed.assistant_pattern,
                turn_dropout=parsed.turn_dropout,
                preprocessing_workers=parsed.preprocessing_workers,
                retry_failed=parsed.retry_failed,
                mixed_versions=parsed.mixed_versions,
                ignore_free_space=parsed.ignore_free_space,
            )
    except KeyboardInterrupt:
        sys.stderr.write("Stopped. The same command goes on where this one was.\n")
        return 130
    for note in summary.notes:
        sys.stderr.write(f"note: {note}\n")
    speed = f", {summary.tokens / summary.seconds:.0f} tokens/s" if summary.seconds else ""
    sys.stdout.write(
        f"{summary.output}: {summary.there + summary.written} of {summary.samples} samples, "
        f"layers {', '.join(map(str, summary.layer_ids))}; "
        f"{summary.written} written now{speed}\n"
    )
    if summary.failed:
        index, reason = min(summary.failed.items())
        sys.stdout.write(
            f"{len(summary.failed)} samples have no file; manifest.json says why. "
            f"The first is {index}: {reason}\n"
        )
    if summary.unused:
        sys.stdout.write(
            f"{summary.unused} rows of {parsed.data} are no sample, because speculators can't "
            f"use them: {_some(summary.unused_names, summary.unused)}\n"
        )
    if summary.untrained:
        names = [f"data_{index}.pt" for index in summary.untrained[:_SHOWN]]
        sys.stdout.write(
            f"{len(summary.untrained)} samples teach nothing, because no token of them is "
            f"trained on (loss_mask is 0): {_some(names, len(summary.untrained))}\n"
        )
    return 1 if summary.failed and len(summary.failed) == summary.samples else 0


def _some(names: list[str], count: int) -> str:
    rest = count - len(names[:_SHOWN])
    return "; ".join(names[:_SHOWN]) + (f"; and {rest} more" if rest else "")
