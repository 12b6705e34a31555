"""Generators in processes and threads of every kind; prints what was found, as JSON.

python -m guest.starts CHECKPOINT
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7], list(range(40, 90))]


def process_state() -> dict[str, Any]:
    """What a generator must leave as it was; plain values."""
    import numpy
    import torch

    return {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "random": hash(random.getstate()),
        "numpy": numpy.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        "torch": torch.random.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "affinity": sorted(os.sched_getaffinity(0)),
        "folder": os.getcwd(),
        "umask": _umask(),
        "signals": {
            name: repr(signal.getsignal(getattr(signal, name)))
            for name in ("SIGINT", "SIGTERM", "SIGCHLD", "SIGALRM", "SIGUSR1")
        },
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook)],
    }


def _umask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def left_over() -> dict[str, Any]:
    """What only has to be gone once a generator is closed."""
    return {
        "children": sorted(p.name for p in multiprocessing.active_children()),
        "threads": sorted(t.name for t in threading.enumerate()),
        "memory files": sorted(
            os.readlink(link)
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and "memfd" in os.readlink(link)
        ),
        "shared memory": sorted(p.name for p in _nobody_elses(Path("/dev/shm").iterdir())),
    }


def _nobody_elses(files: Iterable[Path]) -> list[Path]:
    """Without those that another process has mapped or open: what is left over, nobody has."""
    mine, theirs = f"/proc/{os.getpid()}", set()
    for process in Path("/proc").glob("[0-9]*"):
        if str(process) == mine:
            continue
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look at
            theirs |= {line.split()[-1] for line in (process / "maps").read_text().splitlines()}
            theirs |= {os.readlink(link) for link in (process / "fd").iterdir()}
    return [file for file in files if str(file) not in theirs]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{k}: {before[k]} -> {now[k]}" for k in before if before[k] != now[k]]


def added(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of others was there before may go meanwhile."""
    new = {k: sorted(set(now[k]) - set(before[k])) for k in before}
    return [f"{k}: {names}" for k, names in new.items() if names]


def make(folder: str) -> Any:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    return VllmHiddenStatesGenerator(folder, layer_ids=[2, 0], max_model_len=256)


def rows(folder: str) -> list[Any]:
    """A generator's whole life."""
    generator = make(folder)
    try:
        results = generator.generate(PROMPTS)
    finally:
        generator.executor.shutdown()
    return [[layer.float().tolist() for layer in r["hidden_states"]] for r in results]


def applied_rows(folder: str) -> list[Any]:
    """The same in a process that has not called apply() yet."""
    import vllm_compat

    with vllm_compat.applied():
        return rows(folder)


def in_child(method: str, daemon: bool, function: Any, folder: str) -> Any:
    """Calls a function in a process of that kind; an error comes back as its text."""
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(send, function, folder), daemon=daemon)
    child.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        answer = "it died"
    child.join()
    return answer


def _child(send: Any, function: Any, folder: str) -> None:
    try:
        send.send(function(folder))
    except BaseException as error:
        send.send(f"{type(error).__name__}: {error}")


def of_worker(worker: Any) -> dict[str, Any]:
    """In a worker: what is there."""
    import vllm_compat
    from vllm_compat import activation

    return {
        "speculators": "speculators" in sys.modules,
        "applied": activation.is_active(),
        "environment": dict(os.environ),
        "from": vllm_compat.__file__,
    }


def main(folder: str) -> None:
    import vllm_compat

    vllm_compat.apply()
    import speculators.data_generation.vllm_hidden_states_generator  # noqa: F401

    # vLLM imports it where it is installed (EngineArgs.create_engine_config, 0.16.0), for every
    # engine, and Ray puts a hook of its own before sys.excepthook.
    with contextlib.suppress(ImportError):
        importlib.import_module("ray")

    found: dict[str, Any] = {}
    before, nothing = process_state(), left_over()
    # Another thread goes about its own business.
    timer = threading.Timer(1.0, os.environ.__setitem__, ("SOMEBODY_ELSES", "1"))
    timer.start()
    generator = make(folder)
    timer.join()
    found["somebody else's"] = os.environ.pop("SOMEBODY_ELSES", None)
    found["after it was made"] = differences(before, process_state())
    generator.generate(PROMPTS)
    found["after it generated"] = differences(before, process_state())
    found["status"] = list(vllm_compat.status().workers)
    found["workers"] = generator.executor.collective_rpc(of_worker)
    found["pid"] = os.getpid()
    generator.executor.shutdown()
    found["after it was shut down"] = differences(before, process_state())
    del generator
    # What shutdown() has told to end may still be at it.
    deadline = time.monotonic() + 20
    while (left := added(nothing, left_over())) and time.monotonic() < deadline:
        time.sleep(0.2)
    found["left over"] = left
    found["rows"] = {"here": rows(folder)}
    with ThreadPoolExecutor(1) as pool:
        found["rows"]["thread"] = pool.submit(rows, folder).result()
    # Forked: the patches are on there. The others are new interpreters, where they aren't.
    found["rows"]["fork"] = in_child("fork", False, rows, folder)
    # Before we spawn ourselves: that alone settles the start method (get_preparation_data).
    found["at the end"] = differences(before, process_state())
    found["rows"]["spawn"] = in_child("spawn", False, applied_rows, folder)
    found["daemon"] = in_child("fork", True, rows, folder)
    multiprocessing.set_start_method("forkserver", force=True)
    found["rows"]["forkserver"] = in_child("forkserver", False, applied_rows, folder)
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
