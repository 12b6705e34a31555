"""What vLLM's workers find when they start, and how this process gets its own back.

A worker is forked or spawned and has what this process has at that moment: environment
variables, the start method, the main module. Some of it is meant for this process alone and
breaks a worker. So it is changed while workers start, and put back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .system import usable_cores

__all__ = [
    "bind_to_cores",
    "cores_of_workers",
    "cuda_survives_fork",
    "process_settings_kept",
    "start_method",
    "starting_workers",
    "variables",
]

log = logging.getLogger("vllm_compat")

_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_PORT = "VLLM_PORT"
_LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
_ASKED_CHILD = 5.0  # seconds
_PORTS_OF_A_RANK = 16

# Which of a launcher's processes this is, and where the others are. torch's rendezvous obeys
# TORCHELASTIC_USE_AGENT_STORE for every group of processes (torch/distributed/rendezvous.py,
# 2.10 and 2.13): no worker opens the store, and all of them wait for it. What a user sets to
# tune a library (NCCL_*, GLOO_*, UCX_*, CUDA_VISIBLE_DEVICES, I_MPI_*, OMPI_MCA_btl) is not
# in here.
_LAUNCHER = re.compile(
    r"""(RANK|LOCAL_RANK|GROUP_RANK|CROSS_RANK|NODE_RANK
    |WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|CROSS_SIZE|LOCAL_SIZE
    |MASTER_ADDR|MASTER_PORT
    |ROLE_(RANK|NAME|WORLD_SIZE)                                    # torchrun
    |TORCHELASTIC_\w+ | TORCH_WORKER_SERVER_SOCKET
    |ACCELERATE_\w+ | FSDP_\w+ | MEGATRON_LM_\w+ | PARALLELISM_CONFIG_\w+  # accelerate
    |(SLURM|SLURMD|PMI|PMI2|PMIX|PALS|PALS_PMI)_\w+                 # srun, mpiexec, Cray's
    |OMPI_(COMM_WORLD_\w+|UNIVERSE_SIZE|APP_CTX_\w+|FIRST_RANKS|FILE_LOCATION|COMMAND|ARGV
        |NUM_APP_CTX|MCA_(ess|orte|pmix|prte|plm|initial_wdir)\w*)  # Open MPI
    |MPI_(LOCALRANKID|LOCALNRANKS) | MV2_COMM_WORLD_\w+ | FLUX_\w+ | JSM_NAMESPACE_\w+
    )""",
    re.VERBOSE,
)
_LOCAL_RANKS = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID",
)  # fmt: skip


@contextlib.contextmanager
def variables(values: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Sets variables of this process, and puts back what was there.

    Args:
        values: names and what they are to be.
        unless_set: leave alone those that the user has set.
    """
    names = [name for name in values if not (unless_set and name in os.environ)]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: values[name] for name in names})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def starting_workers(vllm_config: Any) -> Iterator[None]:
    """While it lasts, this process is what the workers of one generator need.

    Workers get no variable of a launcher (torchrun, Slurm, ...): they are no ranks of it.
    Several ranks with one ``VLLM_PORT`` get ports of their own. Workers are spawned where
    they would not survive a fork, and share the cores on a CPU. A main module without a file
    (``python - < script``) is not imported in them.

    Args:
        vllm_config: of the generator; vLLM has completed it already.
    """
    from vllm.platforms import current_platform

    rank = _local_rank()
    workers = int(vllm_config.parallel_config.tensor_parallel_size)
    chosen: dict[str, str] = {}
    if current_platform.is_cpu():
        # vLLM spawns there whatever one says.
        chosen |= bind_to_cores(workers)
    else:
        chosen |= _start_method()
        _warn_of_shared_gpus(current_platform, rank, workers)
    if rank and os.environ.get(_PORT, "").isdigit():
        # vLLM takes the first port from there on that is free. Ranks that start at the same
        # time find the same one free, before either has opened it.
        chosen[_PORT] = str(int(os.environ[_PORT]) + rank * _PORTS_OF_A_RANK)
    with variables(chosen), _without_launcher(workers), _importable_main():
        yield


def _local_rank() -> int:
    """Which of its launcher's processes on this machine this is; 0 without a launcher."""
    values = (os.environ.get(name, "") for name in _LOCAL_RANKS)
    return next((int(value) for value in values if value.isdigit()), 0)


@contextlib.contextmanager
def _without_launcher(workers: int) -> Iterator[None]:
    taken = {n: v for n, v in os.environ.items() if _LAUNCHER.fullmatch(n)}
    for name in taken:
        os.environ.pop(name, None)
    if _LOCAL_WORLD_SIZE in taken:
        # vLLM gives it to its workers on a CPU (platforms/cpu.py), and on an XPU unless it is
        # set (v1/worker/xpu_worker.py; 0.11 to 0.33): with this value.
        os.environ[_LOCAL_WORLD_SIZE] = str(workers)
    try:
        yield
    finally:
        if _LOCAL_WORLD_SIZE in taken:
            os.environ[_LOCAL_WORLD_SIZE] = taken.pop(_LOCAL_WORLD_SIZE)
        for name, value in taken.items():
            os.environ.setdefault(name, value)  # another thread may have set it meanwhile


@contextlib.contextmanager
def _importable_main() -> Iterator[None]:
    """Hides the name of a main file that there isn't (``<stdin>``, or deleted since).

    A spawned process imports its parent's main file (multiprocessing.spawn,
    get_preparation_data) and dies of one that it can't open. Without the name it goes on, as
    it does for ``python -c`` and in a notebook.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or os.path.exists(file) or getattr(main, "__spec__", None) is not None:
        yield
        return
    del main.__file__  # type: ignore[union-attr]
    try:
        yield
    finally:
        main.__file__ = file  # type: ignore[union-attr]


# -- forked or spawned ---------------------------------------------------------------------


def start_method() -> str:
    """How the workers of a generator of this process are started: ``fork`` or ``spawn``.

    Raises:
        ValueError: from vLLM: ``VLLM_WORKER_MULTIPROC_METHOD`` is neither.
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor.multiproc_executor import get_mp_context

    # On a CPU vLLM spawns whatever one says: vllm/platforms/cpu.py, check_and_update_config
    # (0.11 to 0.33).
    if current_platform.is_cpu():
        return "spawn"
    with variables(_start_method()):
        return str(get_mp_context().get_start_method())


def _start_method() -> dict[str, str]:
    if os.environ.get(_START_METHOD) == "spawn":
        return {}
    return {} if _in_no_group() and cuda_survives_fork() else {_START_METHOD: "spawn"}


def _in_no_group() -> bool:
    """A forked worker would take this process's group of torch.distributed for its own.

    (vllm/distributed/parallel_state.py, init_distributed_environment, 0.11 to 0.33: it
    makes one only where there is none.)
    """
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized())


def cuda_survives_fork() -> bool:
    """Whether a forked child of this process could use CUDA.

    It can't once anything here has asked CUDA for its devices (``torch.cuda.is_available()``
    does, in its default form); CUDA needn't have been initialised for that, which is all that
    vLLM looks at before it forks. torch knows it in the child only, so a child is asked.
    """
    import torch

    if torch.cuda.is_initialized():
        return False
    # It answers through a pipe: its exit status is lost where SIGCHLD is ignored.
    answer, says = os.pipe()
    child = os.fork()
    if child == 0:
        # Nothing but this one flag, and no exit handlers: the locks that other threads of
        # the parent held stay locked here.
        try:
            os.write(says, b"1" if torch.cuda._is_in_bad_fork() else b"0")
        finally:
            os._exit(0)
    os.close(says)
    try:
        ready, _, _ = select.select([answer], [], [], _ASKED_CHILD)
        return bool(ready) and os.read(answer, 1) == b"0"
    finally:
        os.close(answer)
        # Another's handler may have collected it already.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if not os.waitpid(child, os.WNOHANG)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


# -- which cores, which GPUs -----------------------------------------------------------------


def bind_to_cores(workers: int) -> dict[str, str]:
    """Variables that give each CPU worker of one engine cores of its own.

    vLLM binds one worker to one NUMA node, and refuses when there are fewer nodes.

    Args:
        workers: how many; a single one, or more than there are cores, is left to vLLM.

    Returns:
        Variables to set; none if the user has bound them, or vLLM is to.
    """
    cores = usable_cores()
    if workers == 1 or len(cores) < workers or os.environ.get(_BIND, "auto") != "auto":
        return {}
    return {_BIND: _shares(cores, workers)}


def cores_of_workers(cores: Sequence[int], workers: int, count: int) -> dict[str, str]:
    """Variables that bind the CPU workers of one generator to cores that are its own.

    Args:
        cores: to bind to; empty: don't bind, share what is there.
        workers: of this generator (tensor parallel size).
        count: threads of all workers together.
    """
    return {
        _BIND: _shares(cores, workers) if cores else "nobind",
        "OMP_NUM_THREADS": str(max(1, count // workers)),
    }


def _shares(cores: Sequence[int], workers: int) -> str:
    """vLLM's notation: workers apart by ``|``, cores of one by commas."""
    share = max(1, len(cores) // workers)
    return "|".join(
        ",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(workers)
    )


def _warn_of_shared_gpus(platform: Any, rank: int, workers: int) -> None:
    """vLLM's workers take the first GPUs that this process sees, in every rank the same.

    Which of them are this rank's own is not ours to guess: it may be that this rank alone has
    a generator.
    """
    visible = os.environ.get(platform.device_control_env_var)
    # As many as there are workers: those are probably this rank's own.
    if not rank or (visible is not None and len(visible.split(",")) <= workers):
        return
    taken = "the first GPU" if workers == 1 else f"the first {workers} GPUs"
    log.warning(
        "vllm-compat: this process is number %d of its launcher on this machine, and vLLM's "
        "workers take %s that it sees, as those of the other processes do. If several have a "
        "generator, give each its own GPUs: set %s before vLLM is imported.",
        rank, taken, platform.device_control_env_var,
    )  # fmt: skip


# -- this process stays as it was ------------------------------------------------------------


@contextlib.contextmanager
def process_settings_kept() -> Iterator[None]:
    """Undoes what vLLM changes in this process while a generator is made.

    vLLM's multiprocess executor sets OMP_NUM_THREADS=1 and torch's thread count for itself
    (set_multiprocessing_worker_envs), and the CPU platform writes a dozen variables
    (vllm/platforms/cpu.py): meant for a process of vLLM's own, here it is the user's.
    """
    # Late: it puts a module of its own into sys.modules, and apply() is to leave none.
    import multiprocessing

    import torch

    before, threads = _written_by_vllm(), torch.get_num_threads()
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        default = multiprocessing.get_all_start_methods()[0]
        if method is None and multiprocessing.get_start_method(allow_none=True) == default:
            # Nobody chose it; spawning settles it, and set_start_method() would be refused.
            multiprocessing.set_start_method(None, force=True)
        now = _written_by_vllm()
        for name in set(now) - set(before):
            del os.environ[name]
        for name, value in before.items():
            if now.get(name) != value:
                os.environ[name] = value
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


# Other threads may set variables meanwhile, and theirs are to stay. All that vLLM writes, in
# its platforms and executors, begins like this.
_WRITES = (
    "CCL_", "CUDA_", "HIP_", "IGC_", "KMP_", "LD_PRELOAD", "LOCAL_", "NCCL_", "NUMEXPR_",
    "OMP_", "PROMETHEUS_", "PYTORCH_", "RAY_", "TORCHINDUCTOR_", "TRITON_", "UCX_", "VLLM_",
)  # fmt: skip


def _written_by_vllm() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_WRITES)}
