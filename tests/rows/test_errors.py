"""What is refused, and what a model's own faults look like; each by its message."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conformance.models import VOCABULARY, prompt

import vllm_compat

from .conftest import Checkpoints, Subject, children, error_of, generator_of, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def no_process_is_left(shared: Subject) -> Iterator[None]:
    before = children()
    yield
    assert wait_until(lambda: children() <= before), f"left: {children() - before}"


@pytest.fixture
def folder(applied: Any, checkpoints: Checkpoints) -> Path:
    return checkpoints("llama")[0]


# -- the constructor ---------------------------------------------------------------------------

ARGUMENTS: list[Any] = [
    pytest.param({"layer_ids": [0, 4]}, ValueError, r"4 out of bounds \[0, 3\]", id="layer-4"),
    pytest.param({"layer_ids": [-1]}, ValueError, r"-1 out of bounds", id="layer-minus-1"),
    pytest.param({"layer_ids": []}, ValueError, "layer_ids is empty", id="no-layer"),
    pytest.param({"layer_ids": [1.5]}, ValueError, "1.5 is not an integer", id="half-a-layer"),
    pytest.param({"layer_ids": {0, 1}}, ValueError, "no order", id="set-of-layers"),
    pytest.param(
        {"max_model_len": 1}, ValueError, "max_model_len=1: at least 2", id="length-1"
    ),
    pytest.param({"max_model_len": 1.5}, ValueError, r"max_model_len=1\.5", id="length-1.5"),
    pytest.param({"max_model_len": 10**6}, ValueError, "max_model_len.*4096", id="length-1e6"),
    pytest.param({"nonsense": 1}, TypeError, "nonsense", id="unknown-argument"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), ARGUMENTS)
def test_arguments_that_are_refused(
    folder: Path, arguments: dict[str, Any], kind: type, message: str
) -> None:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    before = children()
    with pytest.raises(kind, match=re.compile(message, re.DOTALL)):
        VllmHiddenStatesGenerator(str(folder), **{"layer_ids": [0], **arguments})
    assert children() == before, "refused only after workers were started"


def test_layers_that_a_small_model_lacks(folder: Path) -> None:
    """The default picks 2, n/2, n-3 and n-1, whatever n is."""
    subject = generator_of(folder)
    assert subject.layer_ids == [2, 2, 1, 3]
    (result,) = subject.generate([prompt(9, 1)])
    assert len(result["hidden_states"]) == 4
    subject.executor.shutdown()


def test_a_model_that_is_not_there(applied: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=re.escape(str(tmp_path))):
        generator_of(tmp_path / "nothing", layer_ids=[0])


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def change_weights(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    change(weights)
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})


def test_a_checkpoint_that_is_cut_short(folder: Path, tmp_path: Path) -> None:
    """The worker fails while it loads."""
    broken = copy_of(folder, tmp_path / "m")
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(
        vllm_compat.VllmCompatError, match="workers did not start; what they printed"
    ):
        generator_of(broken, layer_ids=[0])


def test_interrupted_while_it_is_built(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    def interrupted(self: Any) -> None:
        assert children()
        raise KeyboardInterrupt

    monkeypatch.setattr(VllmHiddenStatesGenerator, "_setup_capture", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator_of(folder, layer_ids=[0])


# -- not finite --------------------------------------------------------------------------------


def test_nan_in_a_layer(folder: Path, tmp_path: Path) -> None:
    """Every prompt would be NaN from that layer on: seen when the generator is built."""
    broken = copy_of(folder, tmp_path / "m")

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.down_proj.weight"][7, 11] = float("nan")

    change_weights(broken, change)
    with pytest.raises(
        vllm_compat.UnsupportedModelError, match=r"layer 2 .*not finite.*weights"
    ):
        generator_of(broken, layer_ids=[0, 3])


def test_nan_for_one_token(folder: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Sequence, layer and position are named, and the next call works."""
    broken = copy_of(folder, tmp_path / "m")
    bad = 77

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][bad, 3] = float("nan")

    change_weights(broken, change)
    reference = checkpoints("llama")[1]
    subject = Subject(generator_of(broken, layer_ids=[2, 0, 3, 2]), reference, [2, 0, 3, 2])
    try:
        clean = [[t for t in prompt(100, s) if t != bad] for s in range(3)]
        subject.check(clean)
        dirty = [*clean[:2], [1, 2, 3, 4, 5, bad, 6, bad], clean[2]]
        for _ in range(3):
            # Of which position depends on the attention kernel: zero times NaN is NaN, also for
            # the positions before, which the mask hides it from.
            with pytest.raises(
                vllm_compat.CaptureError,
                match=r"Sequence 2, layer 0, position [0-5]: .*not finite",
            ):
                subject.generator.generate(dirty)
            subject.check(clean)
    finally:
        subject.close()


def test_infinity_from_overflow(folder: Path, tmp_path: Path) -> None:
    """Finite weights whose product isn't: also an error, not a file of infinities."""
    broken = copy_of(folder, tmp_path / "m")

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"] *= 1e20
        weights["model.layers.1.mlp.down_proj.weight"] *= 1e20

    change_weights(broken, change)
    with pytest.raises(
        (vllm_compat.CaptureError, vllm_compat.UnsupportedModelError), match="not finite"
    ):
        generator_of(broken, layer_ids=[1]).generate([[5, 6, 7]])


# -- the worker's own account ------------------------------------------------------------------


@contextlib.contextmanager
def other_segments(subject: Subject, change: Any) -> Iterator[None]:
    """In the worker: another account of the rows than that of the runner's batch."""

    def lie(worker: Any) -> None:
        capture = worker.worker._vllm_compat.capture
        worker.worker.honest = honest = capture._batch
        capture._batch = lambda: change(honest())

    def stop(worker: Any) -> None:
        worker.worker._vllm_compat.capture._batch = worker.worker.honest

    subject.in_worker(lie)
    yield
    subject.in_worker(stop)


def test_a_runner_that_names_its_rows_wrongly(shared: Subject) -> None:
    """Two sequences of one length, exchanged in the worker: only token ids tell."""
    batch = [prompt(20, 1), prompt(20, 2), prompt(7, 3)]

    def exchanged(segments: Any) -> Any:
        a, b, *others = segments
        return [
            type(a)(b.request_id, a.start, a.count),
            type(a)(a.request_id, b.start, b.count),
            *others,
        ]

    with (
        other_segments(shared, exchanged),
        pytest.raises(
            vllm_compat.CaptureError,
            match=r"Sequence \d, position 0: the model was given token",
        ),
    ):
        shared.generator.generate(batch)
    shared.check(batch)


def test_a_runner_that_computes_something_else(shared: Subject) -> None:
    """Of other lengths: the positions tell."""
    batch = [prompt(20, 1), prompt(11, 2)]
    with (
        other_segments(shared, lambda segments: segments[::-1]),
        pytest.raises(
            vllm_compat.CaptureError, match=r"Sequence \d, position \d+: the model was given"
        ),
    ):
        shared.generator.generate(batch)
    shared.check(batch)


def test_the_tolerance_tells_noise_from_another_row(shared: Subject) -> None:
    (result,) = shared.generator.generate([prompt(40, 1)])
    state, right = result["hidden_states"][0], shared.reference(prompt(40, 1))[0]
    assert error_of(state, right).max() < 0.02
    assert error_of(state.roll(1, 0), right).min() > 0.3


def test_ids_at_the_edge_of_the_vocabulary(shared: Subject) -> None:
    shared.check([[0, VOCABULARY - 1, 0], [VOCABULARY - 1]])
