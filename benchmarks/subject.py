"""One subject of the extraction benchmark, in a process of its own; prints one JSON line.

    python benchmarks/subject.py generator --model PATH --workloads 512-2048:192:8,32

A workload is LENGTHS:PROMPTS:BATCHES: that many prompts, of a length in tokens drawn uniformly
from LENGTHS, once in each of the batch sizes.

Subjects:
    ceiling       vLLM's LLM.generate(max_tokens=1), prefix caching off: what prefill costs
    generator     speculators' generator with vllm-compat
    pickled       the same with the rows in vLLM's own replies (transport='rpc')
    extract       vLLM's own extract_hidden_states, which writes files (vLLM 0.18 and later)
    transformers  AutoModelForCausalLM with output_hidden_states
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil  # vLLM brings it

Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """Prompts, and the batch sizes to run them in."""

    name: str  # "512-2048"
    low: int
    high: int
    count: int
    batch_sizes: tuple[int, ...]

    @staticmethod
    def of(text: str) -> Workload:
        name, count, sizes = text.split(":")
        low, high = map(int, name.split("-"))
        return Workload(name, low, high, int(count), tuple(map(int, sizes.split(","))))

    def prompts(self, vocabulary: int) -> Prompts:
        """The same ones for every subject: random ids, lengths uniform in [low, high]."""
        draw = random.Random(1)
        return [
            [draw.randrange(10, vocabulary) for _ in range(draw.randint(self.low, self.high))]
            for _ in range(self.count)
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
        max_model_len=a.longest + 1,
        gpu_memory_utilization=a.memory,
        tensor_parallel_size=a.tensor_parallel_size,
    )
    return made.generate, made


def llm(a: argparse.Namespace, extract: bool) -> tuple[Callable[[Prompts], Any], Any]:
    import torch
    from vllm import LLM, SamplingParams

    from vllm_compat.worker_environment import bind_to_cores

    more: dict[str, Any] = {}
    if not torch.cuda.is_available():
        # The generator's; with its default, 128, vLLM 0.16 on a CPU without AMX has no kernel.
        more["block_size"] = 16
        os.environ.update(bind_to_cores(a.tensor_parallel_size))  # as the generator's are
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
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": [k + 1 for k in a.layers]}
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
        max_model_len=a.longest + 2,
        max_num_seqs=32,
        max_num_batched_tokens=max(8192, a.longest + 2),
        gpu_memory_utilization=a.memory,
        tensor_parallel_size=a.tensor_parallel_size,
        **more,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(batch: Prompts) -> None:
        engine.generate([{"prompt_token_ids": ids} for ids in batch], sampling, use_tqdm=False)
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
    """Peak resident memory, and GPU memory now, of this process and its workers, in MB."""
    import torch

    found: dict[str, Any] = {
        "driver_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "driver_cuda_initialized": torch.cuda.is_initialized(),
    }
    workers = [process.pid for process in psutil.Process().children(recursive=True)]
    found["worker_rss_mb"] = sorted(map(peak_rss, workers), reverse=True)
    if shutil.which("nvidia-smi"):
        on_gpu = gpu_memory()
        found["driver_gpu_mb"] = on_gpu.get(os.getpid(), 0)
        found["worker_gpu_mb"] = [on_gpu[pid] for pid in workers if pid in on_gpu]
        found["all_gpu_mb"] = on_gpu  # in a container nvidia-smi may know other pids
    return found


def peak_rss(pid: int) -> int:
    """In MB; 0 for a process that has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8") as lines:
            return next((int(x.split()[1]) // 1024 for x in lines if x.startswith("VmHWM")), 0)
    except OSError:
        return 0


def gpu_memory() -> dict[int, int]:
    """GPU memory by process id, in MB, as the driver counts it (CUDA context included)."""
    listing = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found: dict[int, int] = {}
    for line in listing.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit() and used.strip().isdigit():
            found[int(pid)] = found.get(int(pid), 0) + int(used)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", default="2,18,33,35")
    parser.add_argument("--workloads", nargs="+", default=["64-512:64:8,32"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.6)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    a = parser.parse_args()
    a.layers = [int(k) for k in a.layers.split(",")]
    workloads = [Workload.of(text) for text in a.workloads]
    a.longest = max(workload.high for workload in workloads)
    make: dict[str, Callable[[], tuple[Callable[[Prompts], Any], Any]]] = {
        "ceiling": lambda: llm(a, extract=False),
        "generator": lambda: generator(a, "auto"),
        "pickled": lambda: generator(a, "rpc"),
        "extract": lambda: llm(a, extract=True),
        "transformers": lambda: transformers(a),
    }
    with open(os.path.join(a.model, "config.json"), encoding="utf-8") as file:
        vocabulary = json.load(file)["vocab_size"]
    batches = [workload.prompts(vocabulary) for workload in workloads]
    tokens = {w.name: sum(map(len, b)) for w, b in zip(workloads, batches, strict=True)}
    start = time.perf_counter()
    run, kept = make[a.name]()
    construction = time.perf_counter() - start
    run(batches[0][: workloads[0].batch_sizes[0]])  # warm-up
    rates: dict[str, dict[int, list[float]]] = {}
    for workload, batch in zip(workloads, batches, strict=True):
        of_size = rates.setdefault(workload.name, {})
        for size in workload.batch_sizes:
            of_size[size] = [
                tokens[workload.name] / timed(run, batch, size) for _ in range(a.repeats)
            ]
    print(
        "RESULT "
        + json.dumps(
            {
                "subject": a.name,
                "layers": len(a.layers),
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
    end_descendants()
    os._exit(0)


def end_descendants() -> None:
    """Ends them and waits: the next subject needs their memory."""
    started = psutil.Process().children(recursive=True)
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(started, timeout=20)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()
