"""One process that has engines of vLLM's own, and generators; prints what came out, as JSON.

    python -m guest.same_vllm CHECKPOINT

Three engines: LLM in this very process (scheduler, model and all, so that anything that
apply() did to vLLM would show), the same with async scheduling, and AsyncLLM, which has
processes of its own. All with prefix caching and chunked prefill; prompts share a prefix, and
one is longer than a scheduler step.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any
from unittest import mock

ARGUMENTS: dict[str, Any] = {
    "max_model_len": 512,
    "block_size": 16,  # with its default, vLLM 0.16 on a CPU has no kernel for this head size
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "seed": 0,
}


def prompts() -> list[list[int]]:
    from conformance.models import prompt

    shared = prompt(64, 1)
    return [shared + prompt(n, 2) for n in (5, 33, 300)] + [prompt(200, 3), prompt(1, 4)]


def sampling() -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=6, logprobs=4, ignore_eos=True)


def told(output: Any) -> list[Any]:
    """Everything about one answer that a user sees; floats as they are, to the last bit."""
    completion = output.outputs[0]
    return [
        list(completion.token_ids),
        completion.cumulative_logprob,
        [
            sorted((token, entry.logprob, entry.rank) for token, entry in step.items())
            for step in completion.logprobs
        ],
        output.num_cached_tokens,
    ]


def ask(llm: Any) -> dict[str, Any]:
    """Twice together, with nothing cached and with everything; and one by one."""
    requests: list[Any] = [{"prompt_token_ids": p} for p in prompts()]
    assert llm.reset_prefix_cache()
    together = [
        [told(o) for o in llm.generate(requests, sampling(), use_tqdm=False)] for _ in range(2)
    ]
    assert llm.reset_prefix_cache()
    alone = [told(llm.generate([r], sampling(), use_tqdm=False)[0]) for r in requests * 2]
    return {"together": together, "alone": alone}


async def ask_async(engine: Any) -> list[Any]:
    await engine.reset_prefix_cache()
    answers = []
    for index, tokens in enumerate(prompts() * 2):
        request = {"prompt_token_ids": tokens}
        async for output in engine.generate(request, sampling(), f"request-{index}"):
            last = output
        answers.append(told(last))
    return answers


def generator(folder: str) -> Any:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    return VllmHiddenStatesGenerator(folder, layer_ids=[1], max_model_len=512)


class NoStream:
    """For CUDA's streams and events, which say what has been computed: on a CPU, all has."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


def scheduled_ahead(folder: str) -> Any:
    """An LLM with async scheduling, which vLLM's CPU platform would switch off.

    Scheduler, engine core and model runner are vLLM's own asynchronous ones; that the next
    step is scheduled before this one's tokens are known doesn't depend on the device. CUDA's
    streams, which the runner asks for at each step, do nothing from here on in this process.
    """
    import torch
    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform

    theirs = CpuPlatform.check_and_update_config

    def left_on(cls: Any, vllm_config: Any) -> None:
        theirs(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    for name in ("Stream", "current_stream", "stream"):
        setattr(torch.cuda, name, NoStream)
    torch.Event = NoStream
    with mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(left_on)):
        llm = LLM(folder, disable_log_stats=True, async_scheduling=True, **ARGUMENTS)
    runner = core_of(llm).model_executor.driver_worker.worker.model_runner
    runner.async_output_copy_stream = NoStream()  # for the CPU runner's own stand-in, less able
    return llm


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def main(folder: str) -> None:
    answers: dict[str, Any] = {}
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    import vllm_compat

    llm = LLM(folder, disable_log_stats=True, **ARGUMENTS)
    answers["without"] = ask(llm)
    ahead = scheduled_ahead(folder)
    core = core_of(ahead)
    scheduled = {"scheduler": type(core.scheduler).__name__, "batches": core.batch_queue_size}
    scheduled["answers"] = {"without": ask(ahead)}
    vllm_compat.apply()
    answers["with apply()"] = ask(llm)
    scheduled["answers"]["with apply()"] = ask(ahead)
    made = generator(folder)
    answers["beside a generator"] = ask(llm)
    made.generate(prompts())
    answers["after it generated"] = ask(llm)
    scheduled["answers"]["beside a generator"] = ask(ahead)

    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            made.generate(prompts())

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        answers["while it generates"] = ask(llm)
        scheduled["answers"]["while it generates"] = ask(ahead)
    finally:
        stop.set()
        thread.join()
    made.executor.shutdown()
    answers["after it was shut down"] = ask(llm)
    with_async = asyncio.run(asynchronous(folder))
    vllm_compat.revert()
    answers["after revert()"] = ask(llm)
    scheduled["answers"]["after revert()"] = ask(ahead)
    found = {"llm": answers, "async scheduling": scheduled, "async": with_async}
    print("ANSWERS", json.dumps(found))


async def asynchronous(folder: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import vllm_compat

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=folder, disable_log_stats=True, **ARGUMENTS)
    )
    try:
        answers = {"with apply()": await ask_async(engine)}
        vllm_compat.revert()
        answers["after revert()"] = await ask_async(engine)
        vllm_compat.apply()
        answers["with apply() again"] = await ask_async(engine)
    finally:
        engine.shutdown()
    return answers


if __name__ == "__main__":
    main(sys.argv[1])
