"""Replicas on a real Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .support import (
    BATCH,
    LAYERS,
    SAMPLES,
    Command,
    descendants,
    files,
    names,
    shared_files,
    titled,
    wait_until_gone,
)

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_cores")]
slow = pytest.mark.slow


ACTOR = "ray::MapWorker"


def test_two_replicas_write_the_bytes_of_one(
    command: Command, same_files: Callable[[Path], None], tmp_path: Path
) -> None:
    """On a Ray of its own; one of the two actors is killed in between."""
    output = tmp_path / "states"
    run = command.start(output, "--replicas", 2)
    run.wait_for_files(1)
    tree = descendants(run.process.pid)
    actors = titled(tree, ACTOR)
    assert len(actors) == 2
    # One that has made its generator; the other may still be about it.
    killed = next(a for a in actors if shared_files(descendants(a)))
    theirs = descendants(killed)
    left_behind = shared_files(theirs)
    assert left_behind  # vLLM's, between the actor and its worker
    os.kill(killed, signal.SIGKILL)
    text = run.wait()
    assert f"{SAMPLES} of {SAMPLES} samples" in text
    same_files(output)
    wait_until_gone(tree | theirs)
    assert not {path for path in left_behind if path.exists()}


@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_with_another_number_of_replicas(
    command: Command, same_files: Callable[[Path], None], tmp_path: Path, number: int
) -> None:
    """Ctrl-C, as a terminal sends it to all, and kill -9 of the driver alone."""
    output = tmp_path / "states"
    run = command.start(output, "--replicas", 2)
    run.wait_for_files(5)
    tree = descendants(run.process.pid)
    actors = {p for actor in titled(tree, ACTOR) for p in descendants(actor)}
    left_behind = shared_files(actors)
    assert left_behind
    text = run.kill(number, group=number == signal.SIGINT)
    if number == signal.SIGINT:
        assert run.process.returncode == 130, text
        assert "The same command goes on" in text
    # Its Ray, actors and vLLM's workers go with it. Two agents of Ray's look only now and then
    # whether their node is still there.
    agents = titled(tree, "ray::DashboardAgent") | titled(tree, "ray::RuntimeEnvAgent")
    wait_until_gone(tree - agents)
    assert not {path for path in left_behind if path.exists()}
    there = files(output)
    assert 5 <= len(there) < SAMPLES
    summary = command.call(output)
    assert summary.there == len(there)
    assert there.items() <= files(output).items()
    same_files(output)


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 100 << 20},
    )
    cluster.doomed = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    yield cluster
    cluster.shutdown()


def test_a_node_is_lost_in_mid_run(
    command: Command, same_files: Callable[[Path], None], two_nodes: Any, tmp_path: Path
) -> None:
    output = tmp_path / "states"
    run = command.start(
        output, "--replicas", 2, "--address", "auto", RAY_ADDRESS=two_nodes.address
    )
    run.wait_for_files(BATCH + 1)
    os.kill(run.process.pid, signal.SIGSTOP)  # or it would be done before the node is lost
    try:
        actors = titled(descendants(os.getpid()), ACTOR)
        tree = {process for actor in actors for process in descendants(actor)}
        left_behind = shared_files(tree)
        assert left_behind
        two_nodes.remove_node(two_nodes.doomed, allow_graceful=False)
        assert len(names(output)) < SAMPLES
    finally:
        os.kill(run.process.pid, signal.SIGCONT)
    text = run.wait()
    assert f"{SAMPLES} of {SAMPLES} samples" in text
    same_files(output)
    wait_until_gone(tree)
    assert not {path for path in left_behind if path.exists()}


@slow
def test_a_replica_that_can_not_be_made_is_told(command: Command, tmp_path: Path) -> None:
    text = command.start(tmp_path / "states", "--replicas", 2, "--layers", 70).wait(status=1)
    assert "Layer index 70 out of bounds [0, 6]" in text
    assert files(tmp_path / "states") == {}


@slow
def test_states_as_a_column(command: Command, undisturbed: Path) -> None:
    """The class itself in a user's own pipeline of Ray Data."""
    from vllm_compat.extract import HiddenStates

    ray.init(
        address="local", num_cpus=1, object_store_memory=200 << 20, include_dashboard=False
    )
    try:
        first = [torch.load(undisturbed / f"data_{i}.pt") for i in range(BATCH)]
        rows = [
            {"key": f"s{i}", "input_ids": d["input_ids"].numpy()} for i, d in enumerate(first)
        ]
        rows.append({"key": "empty", "input_ids": first[0]["input_ids"].numpy()[:0]})
        found = (
            ray.data.from_items(rows, override_num_blocks=1)
            .map_batches(
                HiddenStates,
                fn_constructor_kwargs={
                    "model": str(command.checkpoint),
                    "layer_ids": list(LAYERS),
                    "max_model_len": 1024,
                    "bits": True,
                },
                batch_size=None,
                num_cpus=1,
                compute=ray.data.ActorPoolStrategy(size=1),
            )
            .take_all()
        )
    finally:
        ray.shutdown()
    by_key = {row["key"]: row for row in found}
    assert by_key["empty"]["error"] == "The sample is empty."
    assert by_key["empty"]["hidden_states"].shape[:2] == (len(LAYERS), 0)
    for index, data in enumerate(first):
        row = by_key[f"s{index}"]
        assert row["error"] == ""
        states = torch.from_numpy(row["hidden_states"].copy()).view(torch.bfloat16)
        assert torch.equal(states, torch.stack(data["hidden_states"]))
        assert row["input_ids"].tolist() == data["input_ids"].tolist()
