"""What one request leaves in a block of the cache is not seen by the next one."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance.hybrid import soil
from conformance.models import prompt
from safetensors.torch import load_file, save_file

import vllm_compat
from vllm_compat.errors import UnsupportedModelError
from vllm_compat.worker.blocks import Blocks

from .conftest import Checkpoints, Restarts, Subject, generator_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# -- recurrent states --------------------------------------------------------------------------


def test_one_token_prompts_in_blocks_of_others(hybrid: Subject) -> None:
    """vLLM runs a step of one-token prompts as decode steps, which go on from what is there."""
    assert hybrid.engine.recurrent
    hybrid.check([prompt(40 + i, i) for i in range(16)])
    for batch in range(3):
        hybrid.check([prompt(1, 40 * batch + i) for i in range(40)])


def test_lengths_to_past_the_convolution(hybrid: Subject) -> None:
    for batch in range(3):
        hybrid.check([prompt(1 + i % 8, 300 + 24 * batch + i) for i in range(24)])
        hybrid.check([prompt(1, 7)])


@pytest.mark.parametrize("value", [3.0, math.nan])
def test_any_state_that_is_left(hybrid: Subject, value: float) -> None:
    """The same without waiting for a block to come round again."""
    batches = [[prompt(1, 500 + i) for i in range(12)], [prompt(n, n) for n in (1, 9, 2, 1)]]
    for batch in batches:
        assert hybrid.in_worker(soil, value) == 6
        hybrid.check(batch)


def test_preempted_hybrid(hybrid: Subject, restarts: Restarts) -> None:
    """A preempted prompt begins again, in blocks of others."""
    scheduler = hybrid.generator.vllm_config.scheduler_config
    with mock.patch.object(scheduler, "long_prefill_token_threshold", 16):
        hybrid.check([prompt(n, n) for n in (300, 320, 1, 310, 330, 1, 315, 305)])
    assert restarts.preempted > 0, "nothing was preempted: not the schedule that was meant"
    hybrid.check([prompt(1, 600 + i) for i in range(9)])


def test_states_in_an_unknown_form() -> None:
    """No vLLM keeps them so; the layer and the config of its cache are all that is made up."""
    from types import SimpleNamespace

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

    spec = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))
    config = KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["layers.0"], kv_cache_spec=spec)],
    )
    layers = {"layers.0": SimpleNamespace(kv_cache=[torch.zeros(2, 10, 3)])}
    with pytest.raises(UnsupportedModelError, match=r"layers\.0 keeps its recurrent states"):
        Blocks(config, layers)


# -- NaN ---------------------------------------------------------------------------------------

SPOILT = 505
"""A token whose embedding is infinite in some checkpoints."""


@pytest.fixture
def spoilt(
    applied: Any, checkpoints: Checkpoints, tmp_path: Path
) -> Iterator[Callable[..., Subject]]:
    """Generators of checkpoints some of whose weights aren't finite."""
    made: list[Subject] = []

    def make(family: str, spoil: Callable[[dict[str, Any]], None], **arguments: Any) -> Subject:
        folder, reference = checkpoints(family)
        shutil.copytree(folder, tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        weights = load_file(file)
        spoil(weights)
        save_file(weights, file, metadata={"format": "pt"})
        layer_ids = arguments.pop("layer_ids", list(reference._layer_ids))
        generator = generator_of(tmp_path / "model", layer_ids=layer_ids, **arguments)
        reference = type(reference)(reference._model, layer_ids)
        made.append(Subject(generator, reference, layer_ids))
        return made[-1]

    yield make
    for subject in made:
        subject.close()


def test_nan_stays_with_its_sequence(spoilt: Callable[..., Subject]) -> None:
    def spoil(weights: dict[str, Any]) -> None:
        weights["model.embed_tokens.weight"][SPOILT] = math.inf

    subject = spoilt("llama", spoil, max_model_len=96, blocks=24)
    good = [prompt(n, n) for n in (5, 33, 90, 1, 17, 64)]
    subject.check(good)
    for seed in range(8):
        with pytest.raises(vllm_compat.CaptureError, match="not finite"):
            subject.generator.generate(
                [prompt(20, seed), [*prompt(30, seed), SPOILT, *prompt(50, seed)]] * 4
            )
        subject.check(good)


def test_nan_past_the_last_captured_layer(spoilt: Callable[..., Subject]) -> None:
    """Nobody asked for that layer, but one that was asked for gets its memory."""

    def spoil(weights: dict[str, Any]) -> None:
        weights["model.layers.3.self_attn.v_proj.weight"][:] = math.nan

    subject = spoilt("gemma2", spoil, max_model_len=96, blocks=24, layer_ids=[0, 2])
    for seed in range(4):
        subject.check([prompt(n, seed + n) for n in (5, 33, 90, 1, 17, 64)])
