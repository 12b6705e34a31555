"""What vLLM's Ray executors leave behind, or don't say.

Nothing in here runs for the multiprocess executor, and Ray is imported only if vLLM has.

``RayDistributedExecutor.shutdown`` (0.11.0 to 0.32.0) kills its actors only if a step went
through Ray's compiled graph. A step of this package is an RPC, so that the actors would live,
with their devices, until Python frees the last handle. And the placement group, which holds
the devices, stays in any case until the driver's Ray is shut down.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

__all__ = ["RayResources", "actor_death"]

_DEPARTURE = 5.0  # seconds for an actor to end by itself


class RayResources:
    """Actors and placement group of one executor.

    Made before the executor is, to tell a placement group that vLLM makes from one that the
    user gave.

    Args:
        vllm_config: what the executor is made from.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._parallel = vllm_config.parallel_config
        self._given = getattr(self._parallel, "placement_group", None)
        ray = _connected()
        if self._given is None and ray is not None:
            # vLLM takes the one that it is called in, if there is one.
            self._given = ray.util.get_current_placement_group()

    def release(self, executor: Any) -> None:
        """Ends the actors, and gives back the placement group if vLLM made it.

        Args:
            executor: that was shut down; None if it could not be made.
        """
        group = getattr(self._parallel, "placement_group", None)
        ray = _connected()
        if ray is None or group is None or not getattr(executor, "uses_ray", True):
            return
        # vLLM's newer Ray executor has handles of another name, and kills those itself.
        actors = getattr(executor, "workers", None) or []
        leaving: dict[Any, Any] = {}
        for actor in actors:
            with contextlib.suppress(Exception):
                # Asked to, an actor takes its files in /dev/shm along; killed, it doesn't.
                leaving[actor.__ray_terminate__.remote()] = actor
        staying: list[Any] = []
        with contextlib.suppress(Exception):
            _, staying = ray.wait([*leaving], num_returns=len(leaving), timeout=_DEPARTURE)
        for reply in staying:
            with contextlib.suppress(Exception):
                ray.kill(leaving[reply])
        if self._given is None:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)


def actor_death(error: BaseException) -> str | None:
    """What Ray says of the actor that an error is about; None if it is about none."""
    if "ray" not in sys.modules:
        return None
    from ray.exceptions import RayActorError

    if not isinstance(error, RayActorError):
        return None
    return " ".join(str(error).split()).rstrip(".")


def _connected() -> Any:
    """Ray, if this process is connected to one."""
    ray = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None
