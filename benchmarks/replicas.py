"""How throughput grows with replicas: `vllm-compat extract` with one and with N, in turn.

    python benchmarks/replicas.py --model CHECKPOINT --data chats.jsonl

On a CPU each replica has one core (--cores), so N of them need N cores that nobody else uses;
the processes of the run itself (the driver, Ray) share them. On GPUs each has one.

Tokens/s is taken from the times of the files between 30 % and 90 % of the samples: by then
all replicas have started, and none has run out of batches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WINDOW = (0.3, 0.9)


def speed(a: argparse.Namespace, replicas: int, data: Path, work: Path) -> float:
    """Tokens/s of one run."""
    output = work / f"states-{replicas}"
    shutil.rmtree(output, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "extract", "--model", a.model, "--data", data,
         "--output", output, "--replicas", str(replicas), "--cpus-per-replica", str(a.cores),
         "--batch-size", str(a.batch_size), "--seq-length", str(a.seq_length),
         "--token-freq-path", work / "token_freq.pt", "--hf-cache-dir", work / "datasets"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{replicas} replicas did not run:\n{done.stdout[-3000:]}")
    lengths = json.loads((output / "sample_lengths.json").read_text())
    files = sorted(
        ((output / f"data_{i}.pt").stat().st_mtime, tokens) for i, tokens in lengths.items()
    )
    low, high = (int(part * (len(files) - 1)) for part in WINDOW)
    tokens = sum(tokens for _, tokens in files[low + 1 : high + 1])
    return tokens / (files[high][0] - files[low][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help="conversations, .jsonl")
    parser.add_argument("--repeat", type=int, default=4, help="the data so often")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cores", type=int, default=1, help="of each replica, on a CPU")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-compat-replicas-") as folder:
        work = Path(folder)
        data = work / "chats.jsonl"
        data.write_text(a.data.read_text() * a.repeat)
        ratios = []
        for number in range(a.rounds):
            one, many = (speed(a, n, data, work) for n in (1, a.replicas))
            ratios.append(many / one)
            print(
                f"round {number + 1}: 1 replica {one:.0f} tokens/s, {a.replicas} replicas "
                f"{many:.0f} tokens/s, ratio {many / one:.2f}",
                flush=True,
            )
    print(f"ratio {statistics.median(ratios):.2f} (median of {a.rounds})")


if __name__ == "__main__":
    main()
