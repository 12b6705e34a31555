"""What vLLM's workers must find while they are started."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from .system import usable_cores

__all__ = ["bind_to_cores", "prepare", "start_method"]

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_ASKED_CHILD = 5.0  # seconds


def prepare(vllm_config: Any) -> None:
    """Sets environment variables for the workers of one generator.

    The generator's constructor puts this process's environment back when it is done.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # vLLM spawns there whatever one says.
        bind_to_cores(vllm_config.parallel_config.tensor_parallel_size)
    elif _must_spawn():
        os.environ[_START_METHOD] = "spawn"


def start_method() -> str:
    """How the workers of a generator of this process are started: ``fork`` or ``spawn``.

    Raises:
        ValueError: from vLLM: ``VLLM_WORKER_MULTIPROC_METHOD`` is neither.
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor.multiproc_executor import get_mp_context

    # On a CPU vLLM spawns whatever one says: vllm/platforms/cpu.py, check_and_update_config
    # (0.11 to 0.32).
    if current_platform.is_cpu() or _must_spawn():
        return "spawn"
    return str(get_mp_context().get_start_method())


def _must_spawn() -> bool:
    return os.environ.get(_START_METHOD) != "spawn" and not cuda_survives_fork()


def cuda_survives_fork() -> bool:
    """Whether a forked child of this process could use CUDA.

    It can't once anything here has asked CUDA for its devices (``torch.cuda.is_available()``
    does, in its default form); CUDA needn't have been initialised for that, which is all that
    vLLM looks at before it forks. torch knows it in the child only, so a child is asked.
    """
    import torch

    if torch.cuda.is_initialized():
        return False
    child = os.fork()
    if child == 0:
        # Nothing but this one flag, and no exit handlers: the locks that other threads of
        # the parent held are locked for ever here.
        poisoned = True
        try:
            poisoned = torch.cuda._is_in_bad_fork()
        finally:
            os._exit(int(poisoned))
    return _exit_status(child) == 0


def _exit_status(child: int) -> int:
    deadline = time.monotonic() + _ASKED_CHILD
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.001)


def bind_to_cores(workers: int) -> None:
    """Gives each CPU worker of one engine cores of its own, through vLLM's variable.

    vLLM binds one worker to one NUMA node, and refuses when there are fewer nodes.

    Args:
        workers: how many; a single one, or more than there are cores, is left to vLLM.
    """
    cores = usable_cores()
    if workers == 1 or len(cores) < workers or os.environ.get(_BIND, "auto") != "auto":
        return
    share = len(cores) // workers
    os.environ[_BIND] = "|".join(
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(workers)
    )
