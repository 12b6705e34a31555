"""What the scripts of these tests have in common; imports nothing of vLLM's by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7], list(range(40, 90)), [9]]
LAYERS = [2, 0]


def make(folder: str) -> Any:
    """A generator, patches on."""
    import vllm_compat

    vllm_compat.apply()
    generator = imported().VllmHiddenStatesGenerator
    return generator(folder, layer_ids=LAYERS, max_model_len=256)


def imported() -> Any:
    """speculators' module, with all that it imports: OpenCV extends LD_LIBRARY_PATH."""
    import speculators.data_generation.vllm_hidden_states_generator as module

    return module


def states(generator: Any) -> list[Any]:
    """For each prompt and layer the rows, as lists of floats."""
    results = generator.generate(PROMPTS)
    return [[layer.float().tolist() for layer in r["hidden_states"]] for r in results]


def environment_of(worker: Any) -> dict[str, str]:
    """In a worker: the variables that it was started with, those of libraries in C included."""
    text = Path("/proc/self/environ").read_text(errors="surrogateescape")
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line) | {
        # As Python has them: vLLM sets some in the worker itself.
        f"now {name}": value
        for name, value in os.environ.items()
    }


def changed(before: dict[str, str]) -> list[str]:
    """Names of variables that are not what they were."""
    return [name for name in {*before, *os.environ} if os.environ.get(name) != before.get(name)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def waited(until: Callable[[], bool], seconds: float) -> bool:
    """Waits for something to come true."""
    deadline = time.monotonic() + seconds
    while not (done := until()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return done


def kill(*pids: int) -> None:
    """Ends what is still there."""
    for pid in pids:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
