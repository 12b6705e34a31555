"""Extraction against vLLM's own prefill, side by side and in turn, in one run.

    python benchmarks/run.py --model PATH                    # on a CPU, a small model
    python benchmarks/run.py --model PATH --preset h200      # Qwen3-8B's shape
    python benchmarks/run.py --model PATH --preset h200-growth

Each round starts every subject once, in a process of its own, one after the other, so that a
machine that drifts drifts for all of them. Writes results.json, results.md and, where
matplotlib is installed, results.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

SUBJECTS = ("ceiling", "generator", "pickled", "extract", "transformers")


@dataclass(frozen=True)
class Preset:
    """What is run.

    Attributes:
        layers: that every subject captures.
        workloads: of the ceiling and the generator, as subject.py takes them.
        repeats: passes of these in a process.
        others: workloads of the other subjects, which take several times as long; one pass.
        more: other layers that the generator captures too, and their workloads.
    """

    layers: str
    workloads: list[str]
    repeats: int
    others: list[str]
    more: dict[str, list[str]] = field(default_factory=dict)


PRESETS = {
    "cpu": Preset("2,15,27,29", ["32-384:32:8,32"], 3, ["32-384:32:8,32"]),
    "cpu-growth": Preset(
        "2,15,27,29",
        ["32-384:128:8,32,128", "16-64:128:1", "1024-2048:8:8"],
        2,
        ["32-384:128:8,32", "16-64:128:1", "1024-2048:8:8"],
        {"29": ["32-384:128:8"], ",".join(map(str, range(30))): ["32-384:128:8"]},
    ),
    "h200": Preset("2,18,33,35", ["512-2048:192:8,32"], 3, ["512-2048:192:8,32"]),
    "h200-growth": Preset(
        "2,18,33,35",
        ["512-2048:128:1,8,32,128", "16-128:512:32", "4096-8192:16:8"],
        2,
        ["512-2048:128:8,32"],
        {"35": ["512-2048:128:8,32"], ",".join(map(str, range(36))): ["512-2048:128:8,32"]},
    ),
}


def turns(preset: Preset, subjects: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each subject and its arguments, in the order of a round."""
    for name in subjects:
        fast = name in ("ceiling", "generator")
        workloads = preset.workloads if fast else preset.others
        repeats = str(preset.repeats if fast else 1)
        yield (
            name,
            ["--repeats", repeats, "--layers", preset.layers, "--workloads", *workloads],
        )
        for layers, of_layers in preset.more.items() if name == "generator" else ():
            yield name, ["--repeats", repeats, "--layers", layers, "--workloads", *of_layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"))
    parser.add_argument("more", nargs="*", help="after --: further arguments of subject.py")
    a = parser.parse_args()
    a.output.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for round_ in range(a.rounds):
        for name, arguments in turns(PRESETS[a.preset], a.subjects.split(",")):
            if name in failed:
                continue
            print(f"round {round_ + 1}/{a.rounds}: {name} {' '.join(arguments)}", flush=True)
            result = run(name, a.model, [*arguments, *a.more], a.output)
            if isinstance(result, str):
                failed[name] = result
            else:
                results.append(result)
            (a.output / "results.md").write_text(summary(results, failed))
    (a.output / "results.json").write_text(
        json.dumps({"machine": machine(), "arguments": sys.argv[1:], "runs": results}, indent=1)
    )
    print(summary(results, failed))
    plot(results, a.output / "results.png")


def run(name: str, model: str, arguments: list[str], output: Path) -> dict[str, Any] | str:
    subject = Path(__file__).with_name("subject.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    done = subprocess.run(
        [sys.executable, str(subject), name, "--model", model, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    (output / f"{name}.log").write_text(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line[len("RESULT ") :])
            return result
    lines = done.stderr.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (errors or lines)[-1][:200]


Setting = tuple[int, str, str]  # layers, lengths, batch size


def rates(results: list[dict[str, Any]], name: str, setting: Setting) -> list[float]:
    layers, lengths, size = setting
    return [
        rate
        for result in results
        if result["subject"] == name
        # The ceiling takes no layers.
        and (name == "ceiling" or result["layers"] == layers)
        for rate in result["tokens_per_s"].get(lengths, {}).get(size, ())
    ]


def settings(results: list[dict[str, Any]]) -> list[Setting]:
    """All that were run, in the order in which they were."""
    found = {
        (result["layers"], lengths, size): None
        for result in results
        for lengths, of_size in result["tokens_per_s"].items()
        for size in of_size
    }
    return list(found)


def summary(results: list[dict[str, Any]], failed: dict[str, str]) -> str:
    """The table: medians, spread and the ratio to the ceiling."""
    lines = [
        machine(),
        "",
        "| subject | layers | tokens of a prompt | batch | tokens/s, median | min to max "
        "| of the ceiling |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SUBJECTS:
        for setting in settings([r for r in results if r["subject"] == name]):
            found, ceiling = rates(results, name, setting), rates(results, "ceiling", setting)
            median = statistics.median(found)
            ratio = f"{median / statistics.median(ceiling):.2f}" if ceiling else ""
            layers, lengths, size = setting
            lines.append(
                f"| {name} | {'' if name == 'ceiling' else layers} | {lengths} | {size} "
                f"| {median:,.0f} | {min(found):,.0f} to {max(found):,.0f} | {ratio} |"
            )
    lines += [
        "",
        "| subject | layers | driver, MB | workers, MB | GPU memory of the driver, MB "
        "| of the workers | start, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, layers in dict.fromkeys((r["subject"], r["layers"]) for r in results):
        of_name = [r for r in results if (r["subject"], r["layers"]) == (name, layers)]
        last = of_name[-1]
        lines.append(
            f"| {name} | {layers} | {max(r['driver_rss_mb'] for r in of_name):,} "
            f"| {listed(last['worker_rss_mb'][:4])} | {last.get('driver_gpu_mb', '')} "
            f"| {listed(last.get('worker_gpu_mb', ()))} "
            f"| {statistics.median(r['construction_s'] for r in of_name):.0f} |"
        )
    lines += [f"\n{name}: did not run ({why})" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


def listed(values: Iterable[int]) -> str:
    return ", ".join(f"{value:,}" for value in values)


def machine() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "speculators", "torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{platform.machine()}, {os.cpu_count()} cores; {', '.join(found)}"


def plot(results: list[dict[str, Any]], file: Path) -> None:
    if not results:
        return
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    # The main workload, over batch sizes; the table has all.
    layers, lengths = results[0]["layers"], next(iter(results[0]["tokens_per_s"]))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in SUBJECTS:
        points = sorted(
            (int(setting[2]), statistics.median(found))
            for setting in settings(results)
            if setting[:2] == (layers, lengths) and (found := rates(results, name, setting))
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_title(f"{layers} layers, prompts of {lengths} tokens")
    axes.set_xlabel("sequences in a batch")
    axes.set_ylabel("tokens/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
