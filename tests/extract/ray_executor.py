"""One generator with vLLM's own Ray executor: run as a script, by test_ray_executor.

vLLM's CPU platform has no key of Ray's for its devices, so that its Ray executor refuses it.
That key is all that is added here (Ray is told of a GPU that isn't there, and nobody uses it);
executor, workers and placement group are vLLM's and Ray's own. More than one worker can't be
had: for those the CPU platform always takes `mp`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ray

import vllm_compat


def add_key() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.ray_device_key = "GPU"


def generate(model: str, executor: Any, transport: Any) -> tuple[list[Any], str, Any]:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    prompts = [[(7 * i + length) % 250 for i in range(length)] for length in (300, 5, 77)]
    with vllm_compat.applied(executor=executor, transport=transport):
        generator = VllmHiddenStatesGenerator(model, [5, 1, 6], max_model_len=1024)
        engine = generator.executor._session.engine
        results = generator.generate(prompts)
        results = generator.generate(prompts)
        (worker,) = engine.rpc("vllm_compat_describe")
        inner = type(engine.executor).__name__
        generator.executor.shutdown()
    return [r["hidden_states"] for r in results], inner, worker


def main() -> None:
    import torch

    model, unreachable = sys.argv[1], sys.argv[2] == "unreachable"
    add_key()
    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=200 << 20,
        runtime_env={"worker_process_setup_hook": add_key},
    )
    expected, *_ = generate(model, "mp", "shared")
    if unreachable:
        # As on another machine: the same process id is somebody else's there.
        from vllm_compat.transport import shared

        honest = shared.Ring.offer.fget

        def elsewhere(self: Any) -> Any:
            offer = honest(self)
            return type(offer)(1, offer.memory, offer.messages, offer.credits, offer.size, "")

        shared.Ring.offer = property(elsewhere)
    found, inner, worker = generate(model, "ray", "auto")
    same = all(
        torch.equal(a, b)
        for one, other in zip(expected, found, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    alive, deadline = Path(f"/proc/{worker['pid']}"), time.monotonic() + 30
    while time.monotonic() < deadline and (
        alive.exists() or not ray.available_resources().get("GPU")
    ):
        time.sleep(0.1)
    groups = [g["state"] for g in ray.util.placement_group_table().values()]
    free = ray.available_resources().get("GPU")
    print(
        json.dumps(
            {"executor": inner, "transport": worker["transport"], "same": same,
             "worker lives": alive.exists(), "groups": groups, "free": free}
        )
    )  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    main()
