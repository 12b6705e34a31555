"""Actors and placement group of an executor, on a real Ray, without vLLM."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_compat.on_ray import RayResources, actor_death

from .support import alive, wait_until_gone

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=2, object_store_memory=100 << 20, include_dashboard=False
    )
    yield
    ray.shutdown()


def executor_in(group: Any) -> tuple[Any, int]:
    """As vLLM's: an actor in a placement group, which a step has not gone through."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Worker:  # in here: Ray's workers can't import a test's module
        def pid(self) -> int:
            return os.getpid()

    strategy = PlacementGroupSchedulingStrategy(group)
    made = ray.remote(num_cpus=1, scheduling_strategy=strategy)(Worker)
    worker = made.remote()
    return SimpleNamespace(uses_ray=True, workers=[worker]), ray.get(worker.pid.remote())


def config(group: Any = None) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(placement_group=group))


def group() -> Any:
    made = ray.util.placement_group([{"CPU": 1}])
    ray.get(made.ready())
    return made


def becomes(made: Any, state: str) -> bool:
    deadline = time.monotonic() + 20
    while ray.util.placement_group_table(made)["state"] != state:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_actors_and_the_group_that_vllm_made_go() -> None:
    made_from = config()
    resources = RayResources(made_from)
    made_from.parallel_config.placement_group = group()  # as vLLM does
    executor, pid = executor_in(made_from.parallel_config.placement_group)
    resources.release(executor)
    wait_until_gone({pid})
    assert becomes(made_from.parallel_config.placement_group, "REMOVED")


def test_a_group_of_the_users_stays() -> None:
    given = group()
    resources = RayResources(config(given))
    executor, pid = executor_in(given)
    resources.release(executor)
    wait_until_gone({pid})
    time.sleep(0.5)
    assert becomes(given, "CREATED")
    ray.util.remove_placement_group(given)


def test_an_executor_that_could_not_be_made_keeps_no_devices() -> None:
    made_from = config()
    resources = RayResources(made_from)
    made_from.parallel_config.placement_group = group()
    resources.release(None)
    assert becomes(made_from.parallel_config.placement_group, "REMOVED")


def test_another_executor_is_left_alone() -> None:
    """The multiprocess one, in an actor that is in a group."""
    given = group()
    executor, pid = executor_in(given)
    executor.uses_ray = False
    RayResources(config(given)).release(executor)
    assert alive(pid)
    ray.util.remove_placement_group(given)


def test_the_death_of_an_actor_is_told() -> None:
    given = group()
    executor, pid = executor_in(given)
    os.kill(pid, 9)
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(executor.workers[0].pid.remote())
    assert "actor" in (actor_death(caught.value) or "")
    assert actor_death(ValueError("no")) is None
    ray.util.remove_placement_group(given)
