"""An EAGLE-3 draft head for SmolLM2-135M, from conversations to a checkpoint, on a CPU.

    python run.py --output DIRECTORY

Conversations become files of hidden states (`vllm-compat extract`), the files are checked
(`vllm-compat check`), and speculators' own training code makes a draft head of them for some
steps. The exit status is 0 only if the loss fell, on the files that were trained on and on
those that weren't, and the checkpoint that was saved loads and has the same loss.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STATES_EXAMPLE = HERE.parent / "smollm2_states"
CONVERSATIONS = STATES_EXAMPLE / "conversations.jsonl"

# Read by the libraries when they are imported, here and in the commands that are started.
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; vLLM's own choice is half of the memory
    "HF_HUB_OFFLINE": "1",  # everything is on the disk
    "TRANSFORMERS_VERBOSITY": "error",
    "LOGURU_LEVEL": "ERROR",
    "DS_ACCELERATOR": "cpu",  # deepspeed, if it is there, warns when it has to find out
    # flex_attention, which the draft uses, can be compiled for a CPU only without gradients.
    "TORCH_COMPILE_DISABLE": "1",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="where all files go")
    parser.add_argument("--conversations", type=Path, default=CONVERSATIONS, help="jsonl")
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct, made here")
    parser.add_argument("--samples", type=int, help="only so many conversations")
    parser.add_argument("--seq-length", type=int, default=256, help="tokens a sample")
    parser.add_argument("--draft-vocabulary", type=int, default=1024, help="tokens it knows")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--tokens-per-step", type=int, default=512)
    arguments = parser.parse_args()
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)

    work = arguments.output.resolve()
    work.mkdir(parents=True, exist_ok=True)
    states, checkpoints = work / "states", work / "draft"
    frequencies = work / "token_freq.pt"  # not among the files that training takes for samples

    print("[1/5] Checkpoint", flush=True)
    model = arguments.model
    if model is None:
        sys.path.insert(0, str(STATES_EXAMPLE))
        from checkpoint import make_checkpoint

        model = work / "SmolLM2-135M-Instruct"
        make_checkpoint(model)
    model = model.resolve()
    print(f"      {model}", flush=True)

    print("[2/5] Hidden states: vllm-compat extract, vllm-compat check", flush=True)
    # Files of states that are there are kept: `extract` goes on where it was.
    shutil.rmtree(checkpoints, ignore_errors=True)
    frequencies.unlink(missing_ok=True)  # speculators keeps what is there, of whatever data
    words = ["extract", "--model", model, "--data", arguments.conversations]
    words += ["--output", states, "--seq-length", arguments.seq_length]
    words += ["--token-freq-path", frequencies, "--hf-cache-dir", work / "datasets"]
    words += ["--preprocessing-workers", 1]
    if arguments.samples:
        words += ["--max-samples", arguments.samples]
    for command in (words, ["check", states]):
        line = [sys.executable, "-m", "vllm_compat", *map(str, command)]
        status = subprocess.run(line, check=False).returncode
        if status:
            print(f"NOT RIGHT: vllm-compat {command[0]} ended with {status}.")
            return 1

    print("[3/5] Vocabulary of the draft, from the token frequencies", flush=True)
    import torch
    from training import load_draft, loss_of, make_draft, train, vocabulary_mapping

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    d2t, t2d = vocabulary_mapping(frequencies, model, arguments.draft_vocabulary, work)
    print(f"      {len(d2t)} of {len(t2d)} tokens: d2t.npy, t2d.npy", flush=True)

    print("[4/5] Training, by speculators", flush=True)
    draft = make_draft(model, d2t, t2d)
    began = time.monotonic()
    history, held_out = train(
        draft,
        states,
        checkpoints,
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        tokens_per_step=arguments.tokens_per_step,
        show=lambda epoch, step, loss: print(
            f"      epoch {epoch + 1} step {step}: loss {loss:.3f}", flush=True
        ),
    )
    seconds = time.monotonic() - began

    print("[5/5] The checkpoint, loaded again", flush=True)
    checkpoint = checkpoints / str(arguments.epochs - 1)
    before, after = history.held_out[0], history.held_out[-1]
    loaded = loss_of(load_draft(checkpoint), held_out)
    print(f"      {checkpoint}: loss {loaded:.4f} on the files that weren't trained on")
    print(
        "\n                        before training      after\n"
        f"loss, trained on         {history.train[0][0]['loss']:14.3f} "
        f"{history.loss(arguments.epochs - 1):10.3f}\n"
        f"loss, not trained on     {before['loss']:14.3f} {after['loss']:10.3f}"
    )
    for ahead in range(3):
        name = f"cond_acc_{ahead}"
        print(f"token {ahead + 1} right            {before[name]:14.1%} {after[name]:10.1%}")
    steps = sum(map(len, history.train.values()))
    print(f"{steps} steps in {seconds:.0f} s.")

    faults = []
    if not history.loss(arguments.epochs - 1) < 0.9 * history.train[0][0]["loss"]:
        faults.append("the loss didn't fall")
    if not after["loss"] < before["loss"]:
        faults.append("the loss didn't fall on the files that weren't trained on")
    # The checkpoint is in bfloat16, the draft in memory in float32.
    if not math.isclose(loaded, after["loss"], rel_tol=0.02):
        faults.append(f"the loaded draft's loss is {loaded:.4f}, not {after['loss']:.4f}")
    if faults:
        print(f"NOT RIGHT: {'; '.join(faults)}.")
        return 1
    print("The loss fell, and the checkpoint loads.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
