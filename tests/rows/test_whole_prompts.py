"""MLA on the V2 runner. No CPU runs either: the config objects are stand-ins here.

An H200 showed the fault and the cure on vLLM 0.26.0: docs/correctness.md.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat import UnsupportedModelError
from vllm_compat.kv_planning import keep_prompts_whole

V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"


def config(mla: bool, tokens: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla, max_model_len=2048),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=tokens, enable_chunked_prefill=True
        ),
    )


@pytest.mark.parametrize(
    ("mla", "runner", "chunked"),
    [(True, V2, False), (True, V1, True), (False, V2, True), (False, V1, True)],
)
def test_chunks_only_where_they_are_right(mla: bool, runner: str, chunked: bool) -> None:
    made = config(mla, 8192)
    keep_prompts_whole(made, runner)
    assert made.scheduler_config.enable_chunked_prefill is chunked


def test_a_step_that_does_not_hold_a_prompt_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="max_num_batched_tokens=2048"):
        keep_prompts_whole(config(mla=True, tokens=512), V2)
    keep_prompts_whole(config(mla=True, tokens=512), V1)
