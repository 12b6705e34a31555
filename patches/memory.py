"""The memory query: asked of the worker, which has a device, not of this process."""

from __future__ import annotations

from typing import Any

from ..record import Patch, at
from ..session import current_session
from ..stand_in import StandIn


def _worker_memory() -> tuple[int, int]:
    """Free and total bytes on the devices of the workers: the least of all ranks."""
    replies = current_session().running_engine.rpc("vllm_compat_memory")
    return min(free for free, _ in replies), min(total for _, total in replies)


class _Cuda(StandIn):
    """``torch.cuda`` without a context of this process (0.5 GB on the driver's GPU)."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return _worker_memory()


class _Torch(StandIn):
    """``torch``, as the generator's module sees it."""

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        self.cuda = _Cuda(torch.cuda)


PATCHES = (
    Patch(
        name="memory-query",
        why=(
            "torch.cuda.mem_get_info() fails without CUDA, and with it makes a context of "
            "0.5 GB in the driver that nobody uses"
        ),
        upstream="speculators 0.3.0, vllm_hidden_states_generator.py",
        delete_when="speculators 0.3.0 is no longer supported",
        needed=lambda look: look.generator_says("torch.cuda.mem_get_info()"),
        speculators="<0.4",
        replaces={at("torch"): _Torch},
    ),
    Patch(
        name="memory-query-0.4",
        why="mem_get_info() says 0 bytes on a CPU, so that there are no KV blocks",
        upstream="speculators 0.4.0, utils/util.py, mem_get_info",
        delete_when="speculators 0.4.x is no longer supported",
        needed=lambda look: look.generator_says("free_memory, _ = mem_get_info()"),
        speculators=">=0.4",
        replaces={at("mem_get_info"): lambda original: _worker_memory},
        discards=(at("mem_get_info"),),
    ),
)
