"""KV caches that hold one prompt at a time, preemption, and models whose layers slide."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from conformance.models import prompt

import vllm_compat

from .conftest import WINDOW, Build, Restarts, Subject, children

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

LONGEST = 96
"""6 blocks of 16 tokens."""


@pytest.fixture(scope="module")
def seven_blocks(build: Build) -> Subject:
    """Six for a prompt, and the null block that vLLM takes for itself."""
    return build(max_model_len=LONGEST, budget=64, blocks=7)


def test_one_prompt_at_a_time(seven_blocks: Subject, restarts: Restarts) -> None:
    assert seven_blocks.generator.vllm_config.cache_config.num_gpu_blocks == 7
    seven_blocks.check([prompt(LONGEST - 1, i) for i in range(6)])
    assert restarts.together <= 2, "more than one prompt fits: not the cache that was meant"


def test_short_ones_beside_long_ones(seven_blocks: Subject) -> None:
    seven_blocks.check([prompt(n, n) for n in (95, 1, 16, 17, 80, 33, 95, 2, 64, 65, 48)])


def test_again_after_it_was_full(seven_blocks: Subject) -> None:
    seven_blocks.check([prompt(LONGEST - 1, 9)])
    seven_blocks.check([prompt(3, 9)])


@pytest.fixture(scope="module")
def crowded(build: Build) -> Subject:
    """All eight begin, and there isn't room for all to end."""
    subject = build(max_model_len=256, budget=128, blocks=24)
    # The scheduler reads it at each step: running prompts take turns in chunks of 16.
    subject.generator.vllm_config.scheduler_config.long_prefill_token_threshold = 16
    return subject


def test_preempted_prompts_come_whole(crowded: Subject, restarts: Restarts) -> None:
    crowded.check([prompt(n, n) for n in (100, 90, 120, 60, 110, 80, 100, 70, 95, 130)])
    assert restarts.preempted > 1, "nothing was preempted: not the schedule that was meant"


def test_preempted_after_another_batch(crowded: Subject, restarts: Restarts) -> None:
    crowded.check([prompt(5, 1), prompt(255, 2)])
    crowded.check([prompt(150 + i, 40 + i) for i in range(9)])
    assert restarts.preempted > 1


def test_a_cache_too_small_for_max_model_len(build: Build) -> None:
    before = children()
    with pytest.raises(
        vllm_compat.InvalidInputError, match=r"KV cache is too small for max_model_len=512"
    ):
        build(max_model_len=512, blocks=7)
    assert children() == before, "a worker was left behind"


def test_a_cache_that_is_smaller_than_it_was_planned(build: Build) -> None:
    """vLLM checks max_model_len against memory; an override of the blocks passes it by."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def few_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.cache_config.num_gpu_blocks_override = 4
        return config

    with mock.patch.object(EngineArgs, "create_engine_config", few_blocks):
        subject = build(max_model_len=LONGEST, budget=64)
    with pytest.raises(
        vllm_compat.CaptureError,
        match=r"Sequence 1 \(60 tokens\) can't be scheduled: the KV cache of 4 blocks",
    ):
        subject.generator.generate([prompt(30, 1), prompt(60, 2), prompt(20, 3)])
    subject.check([prompt(30, 1), prompt(20, 3)])
    subject.close()


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_sliding_windows(build: Build, family: str, restarts: Restarts) -> None:
    """Prompts longer than the window, cut at other places than the window is."""
    subject = build(family, max_model_len=256, budget=48, blocks=40)
    groups = subject.generator.executor._session.kv_cache.scheduler_config.kv_cache_groups
    assert len(groups) == (2 if family == "gemma2" else 1)
    lengths = (WINDOW - 1, WINDOW, WINDOW + 1, 200, 5, 255, 2 * WINDOW, 100, 31, 180)
    subject.check([prompt(n, n) for n in lengths])
    subject.generator.vllm_config.scheduler_config.long_prefill_token_threshold = 16
    subject.check([prompt(n, 1000 + n) for n in (150, 140, 160, 130, 120, 150, 170)])
    subject.check([prompt(7, 7)])
    subject.close()
