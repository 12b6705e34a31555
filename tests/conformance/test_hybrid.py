"""A hybrid model: a sequence's states don't depend on what its blocks held before."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .hybrid import HYBRID, float32_states, soil
from .models import Reference, prompt, write_checkpoint
from .test_batch_shapes import same

# Looked up as a file: importing it would import vLLM before the tests do.
_VLLM = find_spec("vllm")
_KERNELS = "model_executor/layers/mamba/ops/cpu/gdn_attention.py"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        _VLLM is None or not (Path(_VLLM.origin or "").parent / _KERNELS).exists(),
        reason="this vLLM has no kernels for a gated delta net on a CPU",
    ),
]


@pytest.fixture(scope="module")
def hybrid(report: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    from .conftest import Subject

    folder = tmp_path_factory.mktemp(HYBRID.name)
    reference = Reference(write_checkpoint(HYBRID, folder), HYBRID.layer_ids)
    with float32_states():
        generator = VllmHiddenStatesGenerator(
            model_path=str(folder),
            layer_ids=list(HYBRID.layer_ids),
            max_model_len=1024,
            gpu_memory_utilization=0.1,
            tensor_parallel_size=1,
        )
    yield Subject(generator, reference, HYBRID, 1024)
    generator.executor.shutdown()


def soiled(hybrid: Any, batch: list[list[int]]) -> None:
    """As if all blocks had been another request's: that takes more requests than this runs."""
    assert hybrid.generator.executor.collective_rpc(soil, args=(3.0,)) == [6]
    same(hybrid, batch)


def test_prompts_of_one_token(hybrid: Any) -> None:
    soiled(hybrid, [prompt(1, i) for i in range(40)])


def test_the_same_ones_again(hybrid: Any) -> None:
    same(hybrid, [prompt(1, i) for i in range(40)])


def test_lengths_to_past_the_convolution(hybrid: Any) -> None:
    soiled(hybrid, [prompt(1 + i % 8, i) for i in range(24)])


def test_short_beside_long(hybrid: Any) -> None:
    soiled(hybrid, [prompt(n, n) for n in (1, 300, 1, 40, 2, 1, 90, 7)])


def test_one_by_one(hybrid: Any) -> None:
    for seed in range(3):
        soiled(hybrid, [prompt(1, seed)])
