"""States and speed of several GPUs against one. Needs as many GPUs as --size says.

    python benchmarks/make_model.py dense /tmp/dense
    python benchmarks/make_model.py moe /tmp/moe --small
    python benchmarks/tensor_parallel.py /tmp/dense /tmp/moe --size 2

For each model: `vllm-compat verify` with one GPU and with all of them (errors against
transformers must be of one size: the noise of the dtype), then the ceiling and the generator
with all of them, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def verify(model: str, layers: list[str], size: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "verify", "--model", model, "--json",
         "--layers", *layers, "--tensor-parallel-size", str(size)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    start = done.stdout.find("{")
    if start < 0:
        sys.exit(f"verify with {size} GPUs did not run:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout[start:])
    return {"exit": done.returncode, **result}


def speed(name: str, model: str, layers: list[str], size: int, more: list[str]) -> Any:
    done = subprocess.run(
        [sys.executable, str(HERE / "subject.py"), name, "--model", model,
         "--layers", ",".join(layers), "--tensor-parallel-size", str(size), *more],
        capture_output=True, text=True, check=False,
        env={"VLLM_LOGGING_LEVEL": "WARNING", **os.environ},
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])
    sys.exit(f"{name} did not run:\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("tensor-parallel.json"))
    parser.add_argument("more", nargs="*", help="after --: further arguments of subject.py")
    a = parser.parse_args()
    report: dict[str, Any] = {}
    for model in a.models:
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
        count = config["num_hidden_layers"]
        layers = [str(k) for k in (2, count // 2, count - 3, count - 1)]
        runs: dict[str, Any] = {
            "verify": {size: verify(model, layers, size) for size in (1, a.size)},
            "speed": [
                speed(name, model, layers, a.size, a.more)
                for _ in range(a.rounds)
                for name in ("ceiling", "generator")
            ],
        }
        report[model] = runs
        for batch in runs["speed"][0]["tokens_per_s"]:
            of = {
                name: statistics.median(
                    rate
                    for run in runs["speed"]
                    if run["subject"] == name
                    for rate in run["tokens_per_s"][batch]
                )
                for name in ("ceiling", "generator")
            }
            ratio = of["generator"] / of["ceiling"]
            print(f"{model}, batch {batch}: {of['generator']:,.0f} tokens/s, {ratio:.2f}")
        for size, found in runs["verify"].items():
            print(f"{model}, {size} GPU(s): verify ended with {found['exit']}")
    a.output.write_text(json.dumps(report, indent=1), "utf-8")


if __name__ == "__main__":
    main()
