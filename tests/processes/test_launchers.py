"""Generators in processes that torchrun, Slurm, accelerate, DeepSpeed or mpirun started."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conformance.models import FAMILIES, Reference, write_checkpoint
from guest.processes import HANGS, environment

from vllm_compat import worker_environment

from .generators import LAYERS, PROMPTS

pytest.importorskip("vllm")

ROW_TOLERANCE = 0.05  # bf16 noise; a row of another token is off by about 100 %


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """A checkpoint, and transformers' states of the prompts."""
    folder = tmp_path_factory.mktemp("llama")
    reference = Reference(write_checkpoint(FAMILIES[0], folder), LAYERS)
    return folder, [list(reference(ids)) for ids in PROMPTS]


def torchrun(*arguments: str | Path, **variables: str) -> str:
    """Two ranks on this machine.

    Returns:
        What they print.
    """
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
         "--master-port", str(free_port()), "-m", "processes.launched", *map(str, arguments)],
        env=environment(**variables), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = launcher.communicate(timeout=HANGS)
    except subprocess.TimeoutExpired:
        for process in psutil.Process(launcher.pid).children(recursive=True):
            process.kill()
        launcher.kill()
        pytest.fail(f"torchrun hangs: {launcher.communicate()[0][-3000:]}")
    assert launcher.returncode == 0, output[-4000:]
    return output


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


@pytest.mark.engine
@pytest.mark.parametrize(("who", "port"), [("both", False), ("both", True), ("first", False)])
def test_torchrun(
    model: tuple[Path, list[list[Any]]], tmp_path: Path, who: str, port: bool
) -> None:
    """vLLM's workers are no ranks of the launcher: they would wait for its store for good."""
    checkpoint, right = model
    torchrun(checkpoint, tmp_path, who, **{"VLLM_PORT": str(free_port())} if port else {})
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ranks"] == [0, 1]
        assert found["changed"] == []
        if who == "first" and rank:
            continue
        for states, expected in zip(found["rows"], right, strict=True):
            for layer, reference in zip(states, expected, strict=True):
                off = (torch.tensor(layer) - reference).norm(dim=-1) / reference.norm(dim=-1)
                assert off.max() < ROW_TOLERANCE
        assert launchers(found["worker"]) == {"LOCAL_WORLD_SIZE": "1"}


def launchers(variables: dict[str, str]) -> dict[str, str]:
    """Of a worker's variables those that a launcher sets."""
    return {
        name: value
        for name, value in variables.items()
        if worker_environment._LAUNCHER.fullmatch(name)
    }


# -- variables of other launchers ------------------------------------------------------------

LAUNCHED = {
    "torchrun": (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
        "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    ),
    "Slurm": (
        "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_JOB_ID",
        "SLURM_STEP_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_SRUN_COMM_HOST", "PMI_RANK",
        "PMI_SIZE", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE",
    ),
    "accelerate": (
        "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "ACCELERATE_DYNAMO_BACKEND",
        "FSDP_VERSION", "FSDP_CPU_RAM_EFFICIENT_LOADING", "MEGATRON_LM_TP_DEGREE",
        "PARALLELISM_CONFIG_TP_SIZE",
    ),
    "DeepSpeed": ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess_base_vpid", "OMPI_MCA_orte_hnp_uri",
        "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_RANK",
    ),
}  # fmt: skip

# Set on purpose, for what a worker loads.
THE_USERS = {
    "NCCL_DEBUG": "WARN",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp",
    "CUDA_VISIBLE_DEVICES": "3,5",
    "I_MPI_DEBUG": "0",
    "OMPI_MCA_btl": "self",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "RANKING": "mine",
    "MY_RANK": "mine",
}

ASK = """
import json, os, sys
from processes.generators import changed, environment_of, imported, make
if __name__ == "__main__":
    imported()
    before = dict(os.environ)
    generator = make(sys.argv[1])
    (worker,) = generator.executor.collective_rpc(environment_of)
    generator.executor.shutdown()
    print("FOUND", json.dumps([worker, changed(before)]))
"""


@pytest.fixture(scope="module")
def asked(model: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker's variables, with those of all launchers set, and whether ours stayed."""
    script = tmp_path_factory.mktemp("script") / "ask.py"
    script.write_text(ASK)
    theirs = {name: "1" for names in LAUNCHED.values() for name in names}
    theirs["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # or the old code would only hang
    done = subprocess.run(
        [sys.executable, str(script), str(model[0])], check=False,
        env=environment(**theirs, **THE_USERS, LOCAL_WORLD_SIZE="2", UNREADABLE="\udcff"),
        capture_output=True, text=True, timeout=HANGS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (line,) = (part for part in done.stdout.splitlines() if part.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.engine
@pytest.mark.parametrize("launcher", LAUNCHED)
def test_a_launcher_s_variables_do_not_reach_the_workers(asked: Any, launcher: str) -> None:
    worker, _ = asked
    reached = [n for n in LAUNCHED[launcher] if n in worker or f"now {n}" in worker]
    assert reached == []
    assert worker["LOCAL_WORLD_SIZE"] == "1"  # vLLM's own meaning: workers of this engine


@pytest.mark.engine
def test_the_user_s_variables_do(asked: Any) -> None:
    worker, _ = asked
    assert {name: worker.get(name) for name in THE_USERS} == THE_USERS


@pytest.mark.engine
def test_the_driver_keeps_its_environment(asked: Any) -> None:
    assert asked[1] == []


def test_every_variable_that_accelerate_sets_is_known() -> None:
    """Read from accelerate's own launcher, where it is installed."""
    launch = pytest.importorskip("accelerate.utils.launch")
    import re

    names = re.findall(r"current_env\[\"(\w+)\"\]", Path(launch.__file__).read_text())
    kept = re.compile(r".*(_VISIBLE_\w+|AFFINITY_MASK)|(OMP|KMP|XLA|CCL|I_MPI)_\w+|PYTHONPATH")
    unknown = {
        name
        for name in names
        if not worker_environment._LAUNCHER.fullmatch(name) and not kept.fullmatch(name)
    }
    assert unknown == set()


# -- which GPUs, which ports -------------------------------------------------------------
#
# The platform is made up here: there is no GPU.

GPU = SimpleNamespace(device_control_env_var="CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("rank", "visible", "workers", "warns"),
    [
        (0, "0,1,2,3", 1, False),  # it has the first ones in any case
        (1, "0,1,2,3", 1, True),
        (1, None, 1, True),
        (1, "1", 1, False),
        (1, "2,3", 2, False),
        (3, "0,1,2,3", 2, True),
    ],
)
def test_ranks_on_the_same_gpu_are_told(
    rank: int,
    visible: str | None,
    workers: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING, "vllm_compat"):
        worker_environment._warn_of_shared_gpus(GPU, rank, workers)
    assert ("CUDA_VISIBLE_DEVICES" in caplog.text) is warns


@pytest.fixture
def config() -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "4000"),
        ({"LOCAL_RANK": "0"}, "4000"),
        ({"LOCAL_RANK": "2"}, "4032"),
        ({"SLURM_LOCALID": "1"}, "4016"),
        ({"LOCAL_RANK": "?"}, "4000"),
    ],
)
def test_each_rank_has_ports_of_its_own(
    config: Any, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in worker_environment._LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"VLLM_PORT": "4000", **variables}.items():
        monkeypatch.setenv(name, value)
    with worker_environment.starting_workers(config):
        assert os.environ["VLLM_PORT"] == expected
    assert os.environ["VLLM_PORT"] == "4000"


def test_a_variable_that_another_thread_sets_meanwhile_stays(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", "1")
    with worker_environment.starting_workers(config):
        assert "MASTER_PORT" not in os.environ
        os.environ["MASTER_PORT"] = "2"
    assert (os.environ["MASTER_PORT"], os.environ["RANK"]) == ("2", "1")
