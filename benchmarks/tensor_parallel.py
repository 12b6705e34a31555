"""States, speed and memory of several GPUs against one. Needs as many GPUs as --size says.

    python benchmarks/make_model.py dense /tmp/dense
    python benchmarks/make_model.py moe /tmp/moe
    python benchmarks/tensor_parallel.py /tmp/dense /tmp/moe --size 2

For each model: the states of the same prompts with one GPU and with all of them, and of
transformers in float32 and in the checkpoint's dtype, whose distance is the noise of the
dtype; then the ceiling and the generator with all GPUs, in turn. Without GPUs the workers are
processes on this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run import run, summary

# More than one scheduler step's 8192 tokens together, so that prompts are cut in chunks.
LENGTHS = (512, 777, 1300, 2048, 100, 2000, 1900, 1800, 3, 1, 17)
SHORT = (300, 64, 512, 3, 1, 17)
SPEED = "512-2048:128:8,32"


# -- in a process of its own each: states, to a file ---------------------------------------


def prompts(model: str, short: bool) -> list[list[int]]:
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    draw = random.Random(3)
    return [
        [draw.randrange(10, config["vocab_size"]) for _ in range(length)]
        for length in (SHORT if short else LENGTHS)
    ]


def vllm_states(a: argparse.Namespace, batch: list[list[int]]) -> dict[str, Any]:
    import vllm_compat

    vllm_compat.apply()
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    generator = VllmHiddenStatesGenerator(
        a.models[0],
        layer_ids=a.layers,
        max_model_len=max(map(len, batch)) + 1,
        gpu_memory_utilization=a.memory,
        tensor_parallel_size=a.size,
    )
    states = [result["hidden_states"] for result in generator.generate(batch)]
    config = generator.vllm_config
    facts = {
        "workers": list(vllm_compat.status().workers),
        "sequence_parallelism": {
            "pass_config.enable_sp": getattr(
                config.compilation_config.pass_config, "enable_sp", None
            ),
            "use_sequence_parallel_moe": getattr(
                config.parallel_config, "use_sequence_parallel_moe", None
            ),
        },
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }
    generator.executor.shutdown()
    return {"states": states, "facts": facts}


def transformers_states(a: argparse.Namespace, batch: list[list[int]]) -> dict[str, Any]:
    import torch

    from vllm_compat.checks.reference import transformers_states

    device = "cuda" if torch.cuda.is_available() else "cpu"
    states = transformers_states(
        a.models[0], a.layers, getattr(torch, a.states_of), device=device
    )
    return {"states": [states(prompt) for prompt in batch], "facts": {}}


def write_states(a: argparse.Namespace) -> None:
    import torch

    batch = prompts(a.models[0], a.short)
    of: Callable[..., dict[str, Any]] = (
        vllm_states if a.states_of == "vllm" else transformers_states
    )
    torch.save(of(a, batch), a.output)


# -- the whole --------------------------------------------------------------------------------


def states(a: argparse.Namespace, model: str, of: str, size: int, layers: list[int]) -> Any:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "states.pt"
        done = subprocess.run(
            [sys.executable, __file__, model, "--states-of", of, "--size", str(size),
             "--layers", *map(str, layers), "--memory", str(a.memory), "--output", str(file),
             *(["--short"] if a.short else [])],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{of} with {size} GPUs did not run:\n{done.stderr[-3000:]}")
        return torch.load(file)


def distance(got: Any, want: Any, layer_ids: list[int]) -> dict[str, Any]:
    """Relative errors by layer, and rows that look like another place's."""
    import torch

    from vllm_compat.checks.rows import compare

    found = compare(got, want, layer_ids)
    whole = []
    for place in range(len(layer_ids)):
        a = torch.cat([prompt[place].float() for prompt in got])
        b = torch.cat([prompt[place].float() for prompt in want])
        whole.append(float((a - b).norm() / b.norm()))
    return {
        "whole": whole,
        "mean": [layer.mean for layer in found.layers],
        "worst_row": [layer.worst for layer in found.layers],
        "moved": [str(moved) for moved in found.moved],
    }


def compared(a: argparse.Namespace, model: str, layers: list[int]) -> dict[str, Any]:
    dtype = "bfloat16"
    one = states(a, model, "vllm", 1, layers)
    all_ = states(a, model, "vllm", a.size, layers)
    exact = states(a, model, "float32", 1, layers)["states"]
    noisy = states(a, model, dtype, 1, layers)["states"]
    return {
        "facts": {1: one["facts"], a.size: all_["facts"]},
        "distances": {
            f"transformers {dtype} to float32": distance(noisy, exact, layers),
            "one to float32": distance(one["states"], exact, layers),
            f"{a.size} to float32": distance(all_["states"], exact, layers),
            f"{a.size} to one": distance(all_["states"], one["states"], layers),
        },
    }


def distances(model: str, report: dict[str, Any]) -> str:
    """The table of the states."""
    layers = " | layer ".join(map(str, report["layers"]))
    lines = [f"\n| {Path(model).name} | layer {layers} | rows moved |"]
    lines.append("|---" * (len(report["layers"]) + 2) + "|")
    for what, found in report["states"]["distances"].items():
        errors = " | ".join(
            f"{100 * whole:.2f} % (worst row {100 * worst:.1f} %)"
            for whole, worst in zip(found["whole"], found["worst_row"], strict=True)
        )
        lines.append(f"| {what} | {errors} | {len(found['moved'])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", help="default: the generator's")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="passes in a round")
    parser.add_argument("--memory", type=float, default=0.6, help="gpu_memory_utilization")
    parser.add_argument("--workloads", nargs="+", default=[SPEED], help="see subject.py")
    parser.add_argument("--short", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--states-of", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.states_of:
        write_states(a)
        return
    # Not at the top: it imports torch, which the process that starts workers does later.
    from vllm_compat.checks.reference import default_layers

    a.output.mkdir(parents=True, exist_ok=True)
    whole: dict[str, Any] = {}
    for model in a.models:
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
        layers = a.layers or default_layers(config["num_hidden_layers"])
        runs: list[dict[str, Any]] = []
        report = whole[model] = {"size": a.size, "layers": layers, "speed": runs}
        report["states"] = compared(a, model, layers)
        print(distances(model, report), flush=True)
        arguments = [
            "--layers", ",".join(map(str, layers)), "--tensor-parallel-size", str(a.size),
            "--memory", str(a.memory), "--repeats", str(a.repeats), "--workloads", *a.workloads,
        ]  # fmt: skip
        failed: dict[str, str] = {}
        for name in ("ceiling", "generator") * a.rounds:
            result = run(name, model, arguments, a.output)
            if isinstance(result, str):
                failed[name] = result
            else:
                runs.append(result)
            (a.output / "results.json").write_text(json.dumps(whole, indent=1), "utf-8")
        print(summary(runs, failed), flush=True)


if __name__ == "__main__":
    main()
