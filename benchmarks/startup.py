"""What it costs to import vllm_compat and to call apply(), next to what they precede.

    python benchmarks/startup.py [--runs N]

Each run is a process of its own. Byte code is on disk after the first, and the files of vLLM
are in the page cache, as they are on any second start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

MEASURED = """
import json, sys, time
begin = time.perf_counter()
import vllm_compat
imported = time.perf_counter()
vllm_compat.apply()
applied = time.perf_counter()
brought = [n for n in ("vllm", "torch", "transformers", "speculators") if n in sys.modules]
after = time.perf_counter()
if "all" in sys.argv:
    import speculators.data_generation.vllm_hidden_states_generator
done = time.perf_counter()
print("MEASURED", json.dumps([imported - begin, applied - imported, done - after, brought]))
"""


def measure(*arguments: str) -> list[float]:
    """Seconds of the import, of apply(), and (with "all") of speculators' own import."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments],
        capture_output=True, text=True, env=env, check=True,
    )  # fmt: skip
    (line,) = (part for part in done.stdout.splitlines() if part.startswith("MEASURED "))
    *seconds, brought = json.loads(line.removeprefix("MEASURED "))
    if brought:
        raise SystemExit(f"apply() imported {', '.join(brought)}")
    return list(map(float, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    measure()
    measured = [measure() for _ in range(runs)]
    whole = measure("all")[2]
    for name, column in (("import vllm_compat", 0), ("vllm_compat.apply()", 1)):
        values = [1e3 * run[column] for run in measured]
        print(
            f"{name:<42} median {statistics.median(values):6.1f} ms, "
            f"least {min(values):6.1f} ms, {runs} runs"
        )
    print(f"{'import of the generator (vLLM, torch, ...)':<42} once   {1e3 * whole:6.0f} ms")


if __name__ == "__main__":
    main()
