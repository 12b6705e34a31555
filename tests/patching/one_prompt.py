"""Runs the generator on a checkpoint; prints OK if its states are transformers'.

    python one_prompt.py CHECKPOINT [prefix-caching] [fork]

A script of its own, because what it runs with (VLLM_COMPAT_SKIP, the package's place on
sys.path) is decided before Python starts.
"""

from __future__ import annotations

import sys

PROMPTS = [list(range(3, 60)), [*range(3, 50), 7, 8, 9], [5]]


def force_prefix_caching() -> None:
    """As a vLLM would be that has caching on whatever it is asked for."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: object, **kwargs: object) -> object:
        config = create(self, *args, **kwargs)
        config.cache_config.enable_prefix_caching = True
        return config

    EngineArgs.create_engine_config = create_engine_config


def force_fork() -> None:
    """Workers are forked, as vLLM does it on a GPU; on a CPU it insists on spawn."""
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def main() -> None:
    import vllm_compat

    vllm_compat.apply()
    print("package:", vllm_compat.__file__)
    if "prefix-caching" in sys.argv[2:]:
        force_prefix_caching()
    if "fork" in sys.argv[2:]:
        force_fork()
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )
    from transformers import AutoModelForCausalLM

    generator = VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[1, 0], max_model_len=256)
    for _ in range(2):  # the second call meets what the first left behind
        results = generator.generate(PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    seen: dict[int, torch.Tensor] = {}

    def keep(index: int) -> object:
        def hook(module: object, args: object, output: object) -> None:
            states = output[0] if isinstance(output, tuple) else output
            seen[index] = states.reshape(-1, states.shape[-1])

        return hook

    for index in (0, 1):
        model.model.layers[index].register_forward_hook(keep(index))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result["input_ids"].tolist() == prompt
        with torch.no_grad():
            model(torch.tensor([prompt]))
        for index, states in zip([1, 0], result["hidden_states"], strict=True):
            error = (states.float() - seen[index]).norm(dim=-1) / seen[index].norm(dim=-1)
            assert error.max() < 0.05, f"layer {index}: {error.max():.3f}"
    print("OK")


if __name__ == "__main__":
    main()
