"""Runs with one generator: what they write, and how they go on after an interruption."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.checks.files import check_directory
from vllm_compat.extract import DiskError, Job, OutputConflictError, ReplicaError
from vllm_compat.extract.job import default_layers
from vllm_compat.extract.replica import Failure, Replica
from vllm_compat.extract.samples import Samples

from .support import (
    BATCH,
    LAYERS,
    SAMPLES,
    Command,
    descendants,
    files,
    names,
    shared_files,
    wait_until_gone,
)

pytestmark = pytest.mark.engine
slow = pytest.mark.slow


@slow
def test_the_files_are_those_of_speculators(
    command: Command, undisturbed: Path, tmp_path: Path
) -> None:
    """Against the loop of speculators' script, with the generator itself."""
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset
    from speculators.train.data import Eagle3SampleFileDataset

    import vllm_compat

    dataset, _ = load_and_preprocess_dataset(
        str(command.checkpoint), str(command.conversations), seq_length=1024,
        cache_dir=str(command.work / "datasets"), build_dataset_num_proc=1,
        token_freq_path=str(tmp_path / "token_freq.pt"),
    )  # fmt: skip
    with vllm_compat.applied():
        from speculators.data_generation.vllm_hidden_states_generator import (
            VllmHiddenStatesGenerator,
        )

        generator = VllmHiddenStatesGenerator(
            str(command.checkpoint), list(LAYERS), max_model_len=1024
        )
        for first in range(0, 2 * BATCH, BATCH):
            rows = dataset[first : first + BATCH]
            results = generator.generate(rows["input_ids"])
            for offset, result in enumerate(results):
                there = torch.load(undisturbed / f"data_{first + offset}.pt", weights_only=True)
                assert sorted(there) == ["hidden_states", "input_ids", "loss_mask"]
                assert torch.equal(there["input_ids"], result["input_ids"])
                assert torch.equal(there["loss_mask"], rows["loss_mask"][offset])
                assert len(there["hidden_states"]) == len(LAYERS)
                for mine, theirs in zip(
                    there["hidden_states"], result["hidden_states"], strict=True
                ):
                    assert mine.dtype == torch.bfloat16
                    assert torch.allclose(mine.float(), theirs.float(), rtol=0.02, atol=0.02)
        generator.executor.shutdown()

    config = json.loads((undisturbed / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == list(LAYERS)
    assert config["data"]["num_samples"] == SAMPLES
    assert config["model"]["hidden_size"] == 256
    lengths = json.loads((undisturbed / "sample_lengths.json").read_text())
    assert lengths == {str(i): len(dataset[i]["input_ids"]) for i in range(SAMPLES)}
    samples = Eagle3SampleFileDataset(max_len=1024, datapath=str(undisturbed))
    assert len(samples) == SAMPLES
    assert samples[0]["hidden_states"].shape[1] == 256 * (len(LAYERS) - 1)


def test_a_run_that_is_stopped_goes_on(
    command: Command,
    same_files: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl-C, then by kill -9 of the driver."""
    output = tmp_path / "states"

    run = command.start(output)
    run.wait_for_files(6)
    text = run.kill(signal.SIGINT, group=True)  # as a terminal does
    assert run.process.returncode == 130, text
    assert "The same command goes on" in text
    interrupted = files(output)
    assert 6 <= len(interrupted) < SAMPLES

    run = command.start(output)
    run.wait_for_files(len(interrupted) + 6)
    os.kill(run.process.pid, signal.SIGSTOP)  # or it would be done before all is looked up
    tree = descendants(run.process.pid)
    left_behind = shared_files(tree)
    assert left_behind  # vLLM's, between driver and worker
    run.kill(signal.SIGKILL)  # the driver alone; its workers must notice
    wait_until_gone(tree)
    assert not {path for path in left_behind if path.exists()}
    killed = files(output)
    assert len(killed) < SAMPLES
    assert interrupted.items() <= killed.items()
    (output / "data_43.pt.0123456789abcdef.part").write_bytes(b"begun")

    before = times(output)
    summary = command.call(output)
    assert (summary.there, summary.written) == (len(killed), SAMPLES - len(killed))
    same_files(output)
    assert before.items() <= times(output).items()  # nothing is written twice

    def no_generator(*_: Any) -> None:
        raise AssertionError("there is nothing to compute")

    monkeypatch.setattr(Replica, "start", no_generator)
    before = times(output)
    summary = command.call(output)
    assert (summary.there, summary.written) == (SAMPLES, 0)
    assert times(output) == before
    same_files(output)


@slow
def test_shards_write_what_one_run_writes(
    command: Command, same_files: Callable[[Path], None], tmp_path: Path
) -> None:
    """By the script of docs/scaling.md; the scheduler's one part in it is a number."""
    output = tmp_path / "states"
    # The borders of this part are not those of batches.
    command.call(output, start=3, end=18)
    assert names(output) == sorted(f"data_{i}.pt" for i in range(3, 18))
    counts = json.loads((output / "manifest.json").read_text())["counts"]
    assert counts["missing"] == SAMPLES - 15
    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
    (script,) = re.findall(r"^    (#!/bin/bash\n(?:    .*\n)+)", page, re.MULTILINE)
    script = re.sub("^    ", "", script, flags=re.MULTILINE)
    rest = shlex.join(command.arguments(output)[3:])  # those that the tests need
    for old, new in (
        ("vllm-compat", f"{sys.executable} -m vllm_compat"),
        ("--model MODEL", rest),
        ("--data chats.jsonl", ""),
        ("/shared/states", str(output)),
        ("/8", "/2"),
    ):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "array.sh").write_text(script)
    for task in ("0", "1"):
        subprocess.run(
            ["bash", tmp_path / "array.sh"],
            check=True, env={**os.environ, "SLURM_ARRAY_TASK_ID": task},
        )  # fmt: skip
    same_files(output)
    assert command.call(output).written == 0


def test_other_settings_are_refused(command: Command, undisturbed: Path) -> None:
    before = files(undisturbed)
    with pytest.raises(OutputConflictError, match=r"layer_ids \[5, 1, 6\] there, \[1\] now"):
        command.call(undisturbed, layer_ids=[1])
    with pytest.raises(OutputConflictError, match=f"samples {SAMPLES} there, 7 now"):
        command.call(undisturbed, max_samples=7, token_freq_path=command.work / "others.pt")
    with pytest.raises(OutputConflictError, match="counts the tokens of other data"):
        command.call(undisturbed, max_samples=7)
    assert files(undisturbed) == before


def test_what_changes_no_state_locks_nobody_out(command: Command, undisturbed: Path) -> None:
    before = files(undisturbed)
    summary = command.call(
        undisturbed, batch_size=BATCH + 1, cpus_per_replica=2, tensor_parallel_size=2,
        replicas=2, gpu_memory_utilization=0.5, transport="rpc",
    )  # fmt: skip
    assert (summary.there, summary.written) == (SAMPLES, 0)
    (note,) = summary.notes
    assert "batch_size 4, not 5" in note
    assert "cpus_per_replica 1, not 2" in note
    assert files(undisturbed) == before


def test_a_start_that_fails_claims_nothing(command: Command, tmp_path: Path) -> None:
    """A real one, of an engine: the model has 4096 positions. Then the same with fewer."""
    from speculators.train.data import Eagle3SampleFileDataset

    output = tmp_path / "states"
    # Other data, that token frequencies would be compared with.
    few = {"token_freq_path": None, "max_samples": BATCH}
    with pytest.raises(ReplicaError, match="max_model_len"):
        command.call(output, seq_length=8192, **few | {"max_samples": 3})
    assert not (output / "manifest.json").exists()
    assert names(output) == []
    assert command.call(output, **few).written == BATCH
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["settings"]["seq_length"] == 1024
    # Every file of the folder whose name ends in "pt" is a sample for training.
    assert len(Eagle3SampleFileDataset(max_len=1024, datapath=str(output))) == BATCH
    assert sum(torch.load(output / "token_freq.torch", weights_only=True).values()) > 0


def test_samples_that_teach_nothing_are_named(command: Command, tmp_path: Path) -> None:
    """And rows that are no sample. The files are speculators' all the same."""
    turns = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "because"}]
    rows = [{"conversations": t} for t in (turns, turns[:1], [], turns, turns[:1])]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "states"
    text = command.start(output, "--data", data, "--token-freq-path", tmp_path / "f.pt").wait()
    untrained = [
        i for i in range(4)
        if not torch.load(output / f"data_{i}.pt", weights_only=True)["loss_mask"].any()
    ]  # fmt: skip
    assert len(untrained) == 2
    listed = "; ".join(f"data_{i}.pt" for i in untrained)
    assert "2 samples teach nothing, because no token of them is trained on " in text
    assert f"(loss_mask is 0): {listed}\n" in text
    assert f"1 rows of {data} are no sample, because speculators can't use them: " in text
    assert "use them: line 3: no conversation\n" in text
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["untrained"] == untrained
    assert manifest["unused"] == {"rows": 1, "first": ["line 3: no conversation"]}
    checked = check_directory(output)
    assert checked.sound
    assert checked.untrained == untrained


def test_a_sample_that_fails_is_recorded_and_the_rest_is_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """speculators gives no such samples; a data set of the user's own may."""
    good = [list(range(1, length)) for length in (30, 9, 60)]
    bad = [[], [5, 10**6]]
    ids = [good[0], bad[0], good[1], bad[1], good[2], good[0]]
    samples = Samples.of(ids, [[1] * len(each) for each in ids])
    monkeypatch.setattr("vllm_compat.extract.run.prepare", lambda *_, **__: samples)
    output = tmp_path / "states"
    summary = command.call(output)
    assert names(output) == [f"data_{i}.pt" for i in (0, 2, 4, 5)]
    assert summary.written == 4
    manifest = json.loads((output / "manifest.json").read_text())
    assert manifest["counts"] == {"samples": 6, "written": 4, "missing": 0, "failed": 2}
    assert manifest["failed"]["1"] == "The sample is empty."
    assert "1000000 is outside of the vocabulary" in manifest["failed"]["3"]
    assert command.call(output).failed == summary.failed  # without a generator


@slow
def test_a_full_disk_stops_the_run_and_loses_nothing(
    command: Command,
    same_files: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault-injecting stand-in for the disk: it is full after so many bytes of samples."""
    output = tmp_path / "states"
    room = 6 << 20
    write = os.write

    def limited(fd: int, data: Any) -> int:
        nonlocal room
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".part"):
            room -= len(data)
            if room < 0:
                raise OSError(28, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr("vllm_compat.extract.files.os.write", limited)
        with pytest.raises(DiskError, match=r"data_\d+\.pt can't be written: the disk is full"):
            command.call(output)
    there = files(output)
    assert 0 < len(there) < SAMPLES
    assert not list(output.glob("*.part"))
    summary = command.call(output)
    assert summary.there == len(there)
    assert summary.written == SAMPLES - len(there)
    assert there.items() <= files(output).items()
    same_files(output)


@slow
@pytest.mark.usefixtures("shared_cores")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_disk_that_is_really_full(command: Command, tmp_path: Path, replicas: int) -> None:
    if replicas > 1:
        pytest.importorskip("ray")
    output = tmp_path / "disk"
    output.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", output],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        run = command.start(output / "states", "--replicas", replicas, "--ignore-free-space")
        text = run.wait(status=1)
        assert "can't be written: the disk is full" in text
        there = files(output / "states")
        assert 0 < len(there) < SAMPLES
        for name in there:
            torch.load(output / "states" / name, weights_only=True)
        assert not list((output / "states").glob("*.part"))
    finally:
        subprocess.run(["umount", "-l", output], check=True)


@slow
def test_a_bad_sample_fails_alone_and_a_dead_engine_is_replaced(command: Command) -> None:
    replica = Replica(Job(str(command.checkpoint), seq_length=256, cpus=1))
    good = [[i % 250 for i in range(length)] for length in (30, 7, 200)]
    try:
        first = replica.states(good)
        assert replica.layer_ids == list(default_layers(str(command.checkpoint)))
        mixed = replica.states([good[0], [], good[1], [5, 10**6], good[2], [1, 2.5]])
        reasons = [r.reason for r in mixed if isinstance(r, Failure)]
        assert reasons[0] == "The sample is empty."
        assert "1000000 is outside of the vocabulary" in reasons[1]
        assert "2.5 is not an integer" in reasons[2]
        assert same(first, [mixed[0], mixed[2], mixed[4]])

        # In the middle of a batch, as the kernel would when memory runs out.
        engine = replica._generator
        (worker,) = engine.executor.collective_rpc("vllm_compat_describe")
        step = engine.scheduler.schedule

        def killing() -> Any:
            os.kill(worker["pid"], signal.SIGKILL)
            return step()

        engine.scheduler.schedule = killing
        assert same(first, replica.states(good))
        assert replica._generator is not engine
    finally:
        replica.close()


def times(folder: Path) -> dict[str, int]:
    """When each data file was written."""
    return {name: (folder / name).stat().st_mtime_ns for name in names(folder)}


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(x, y)
        for a, b in zip(one, other, strict=True)
        for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True)
    )
