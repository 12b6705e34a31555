"""One subject of the extraction benchmark, in a process of its own; prints one JSON line.

    python benchmarks/subject.py generator --model PATH --batch-sizes 8,32

Subjects:
    ceiling       vLLM's LLM.generate(max_tokens=1), prefix caching off: what prefill costs
    generator     speculators' generator with vllm-compat
    pickled       the same with the rows in vLLM's own replies (transport='rpc')
    extract       vLLM's own extract_hidden_states, which writes files (vLLM 0.18 and later)
    transformers  AutoModelForCausalLM with output_hidden_states
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]


def prompts(count: int, low: int, high: int, vocabulary: int) -> Prompts:
    """The same prompts for every subject: random ids, lengths uniform in [low, high]."""
    draw = random.Random(1)
    return [
        [draw.randrange(10, vocabulary) for _ in range(draw.randint(low, high))]
        for _ in range(count)
    ]


def timed(run: Callable[[Prompts], Any], batch: Prompts, size: int) -> float:
    start = time.perf_counter()
    for first in range(0, len(batch), size):
        run(batch[first : first + size])
    return time.perf_counter() - start


def generator(a: argparse.Namespace, transport: str) -> tuple[Callable[[Prompts], Any], Any]:
    import vllm_compat

    vllm_compat.apply(transport=transport)  # type: ignore[arg-type]
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    made = VllmHiddenStatesGenerator(
        a.model,
        layer_ids=a.layers,
        max_model_len=a.high + 1,
        gpu_memory_utilization=a.memory,
        tensor_parallel_size=a.tensor_parallel_size,
    )
    return made.generate, made


def llm(a: argparse.Namespace, extract: bool) -> tuple[Callable[[Prompts], Any], Any]:
    import torch
    from vllm import LLM, SamplingParams

    more: dict[str, Any] = {}
    if not torch.cuda.is_available():
        # The generator's; with its default, 128, vLLM 0.16 on a CPU without AMX has no kernel.
        more["block_size"] = 16
    folder = ""
    if extract:
        folder = tempfile.mkdtemp(
            prefix="extract-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        )
        more |= {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                # vLLM counts layers from before, the generator from after: hence + 1.
                "draft_model_config": {
                    "hf_config": {
                        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in a.layers]
                    }
                },
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": folder},
            },
        }
    engine = LLM(
        a.model,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=a.high + 2,
        max_num_seqs=32,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=a.memory,
        tensor_parallel_size=a.tensor_parallel_size,
        **more,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(batch: Prompts) -> None:
        engine.generate(
            [{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False
        )
        for file in glob.glob(f"{folder}/*") if folder else ():
            os.remove(file)

    return run, (engine, folder)


def transformers(a: argparse.Namespace) -> tuple[Callable[[Prompts], Any], Any]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).to(device)

    @torch.inference_mode()
    def run(batch: Prompts) -> None:
        for ids in batch:
            states = model.model(
                torch.tensor([ids], device=device), output_hidden_states=True
            ).hidden_states
            for layer in a.layers:
                states[layer + 1][0].cpu()

    return run, model


def memory() -> dict[str, Any]:
    """Peak resident memory of this process and of its children, in MB; GPU memory here."""
    import torch

    found: dict[str, Any] = {
        "driver_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "driver_cuda_initialized": torch.cuda.is_initialized(),
    }
    workers = [
        int(fields["VmHWM"].split()[0]) // 1024
        for fields in children().values()
        if "VmHWM" in fields
    ]
    found["worker_rss_mb"] = sorted(workers, reverse=True)
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        found["gpu_apps"] = [line.strip() for line in listing.splitlines()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", default="2,18,33,35")
    parser.add_argument("--batch-sizes", default="8,32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--low", type=int, default=64)
    parser.add_argument("--high", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.6)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    a = parser.parse_args()
    a.layers = [int(k) for k in a.layers.split(",")]
    make: dict[str, Callable[[], tuple[Callable[[Prompts], Any], Any]]] = {
        "ceiling": lambda: llm(a, extract=False),
        "generator": lambda: generator(a, "auto"),
        "pickled": lambda: generator(a, "rpc"),
        "extract": lambda: llm(a, extract=True),
        "transformers": lambda: transformers(a),
    }
    with open(os.path.join(a.model, "config.json"), encoding="utf-8") as file:
        vocabulary = json.load(file)["vocab_size"]
    batch = prompts(a.prompts, a.low, a.high, vocabulary)
    tokens = sum(map(len, batch))
    start = time.perf_counter()
    run, kept = make[a.name]()
    construction = time.perf_counter() - start
    sizes = [int(s) for s in a.batch_sizes.split(",")]
    run(batch[: sizes[0]])  # warm-up
    rates: dict[str, list[float]] = {}
    for size in sizes:
        for _ in range(a.repeats):
            rates.setdefault(str(size), []).append(tokens / timed(run, batch, size))
    print(
        "RESULT "
        + json.dumps(
            {
                "subject": a.name,
                "tokens": tokens,
                "construction_s": round(construction, 2),
                "tokens_per_s": rates,
                **memory(),
            }
        ),
        flush=True,
    )
    if a.name == "extract":
        shutil.rmtree(kept[1], ignore_errors=True)
    end_children()
    os._exit(0)


def children() -> dict[int, dict[str, str]]:
    """Processes that this one started: pid to the fields of /proc/PID/status."""
    found = {}
    for status in glob.glob("/proc/[0-9]*/status"):
        try:
            with open(status, encoding="utf-8") as lines:
                fields = dict(line.split(":", 1) for line in lines if ":" in line)
        except OSError:
            continue
        if int(fields.get("PPid", "0")) == os.getpid():
            found[int(fields["Pid"])] = fields
    return found


def end_children() -> None:
    """Ends them and waits: the next subject needs their memory."""
    for pid in children():
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(
        fields["State"].split()[0] != "Z" for fields in children().values()
    ):
        time.sleep(0.2)
    for pid in children():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
