"""The main job: conversations to files of hidden states, then every row checked.

    python run.py --output DIRECTORY

Makes the checkpoint of SmolLM2-135M-Instruct, runs speculators' preprocessing and its
unmodified generator on real vLLM, writes one file a sample, and compares each file
with transformers. The exit status is 0 only if every row is right.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

from check import check_directory, print_outcome, transformers_reference
from checkpoint import make_checkpoint
from states import preprocess, progress_bar, write_states

CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")

# Read by the libraries when they are imported, which happens in the functions below.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's own choice is half of the memory
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # everything is on the disk
    "TRANSFORMERS_VERBOSITY": "error",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="where all files go")
    parser.add_argument("--conversations", type=Path, default=CONVERSATIONS, help="jsonl")
    parser.add_argument("--samples", type=int, help="only so many conversations")
    parser.add_argument("--layers", type=int, nargs="+", help="default: the generator's choice")
    parser.add_argument("--batch-size", type=int, default=8, help="samples for each generate()")
    parser.add_argument("--seq-length", type=int, default=2048, help="tokens a sample")
    arguments = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("speculators").setLevel(logging.WARNING)  # it shows a whole sample

    work = arguments.output.resolve()
    model = work / "SmolLM2-135M-Instruct"
    states = work / "states"

    print("[1/4] Checkpoint", flush=True)
    made = make_checkpoint(model)
    print(f"      {model} {'made' if made else 'is there'}", flush=True)

    print("[2/4] Preprocessing, by speculators", flush=True)
    dataset = preprocess(
        model, arguments.conversations, work, arguments.seq_length, arguments.samples
    )
    tokens = sum(len(ids) for ids in dataset["input_ids"])
    trained = sum(int(mask.sum()) for mask in dataset["loss_mask"])
    print(
        f"      {len(dataset)} conversations, {tokens} tokens, {trained} of them to train on",
        flush=True,
    )

    print("[3/4] Hidden states, by speculators' generator on vLLM", flush=True)
    run = write_states(
        model,
        dataset,
        states,
        conversations=arguments.conversations,
        work=work,
        seq_length=arguments.seq_length,
        samples=arguments.samples,
        layer_ids=arguments.layers,
        batch_size=arguments.batch_size,
    )
    print(f"      engine ready after {run.start_seconds:.0f} s; files in {states}", flush=True)

    print("[4/4] Check against transformers, row by row", flush=True)
    import torch

    # vLLM leaves one thread to the process that drives it.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    began = time.monotonic()
    with progress_bar(total=tokens, desc="check", unit="token") as progress:
        outcome = check_directory(
            states,
            list(dataset),
            run.layer_ids,
            transformers_reference(model, run.layer_ids),
            progress.update,
        )
    print_outcome(outcome)
    print(
        f"{run.samples} samples, {run.tokens} tokens, {len(run.layer_ids)} layers: "
        f"{run.tokens / run.generate_seconds:.0f} tokens/s through vLLM; "
        f"checked in {time.monotonic() - began:.0f} s."
    )
    if outcome.wrong:
        print(f"NOT RIGHT: {len(outcome.wrong)} faults.")
        return 1
    print(f"Every row of all {run.samples} files is right.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
