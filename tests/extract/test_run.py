"""Runs with one generator: what they write, and how they go on after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.extract import DiskError, Job, extract
from vllm_compat.extract.job import default_layers
from vllm_compat.extract.replica import Failure, Replica

from .support import BATCH, LAYERS, SAMPLES, Command, files

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def call(command: Command, output: Path, **more: Any) -> Any:
    """The same run as the command's, in this process."""
    given: dict[str, Any] = {
        "layer_ids": LAYERS,
        "seq_length": 1024,
        "batch_size": BATCH,
        "cpus_per_replica": 1,
        "token_freq_path": command.work / "token_freq.pt",
        "cache_dir": str(command.work / "datasets"),
        "preprocessing_workers": 1,
    }
    return extract(str(command.checkpoint), str(command.conversations), output, **given | more)


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
    command: Command, same_files: Callable[[Path], None], tmp_path: Path
) -> None:
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
    run.kill(signal.SIGKILL)  # the driver alone; its workers must notice
    killed = files(output)
    assert len(killed) < SAMPLES
    assert interrupted.items() <= killed.items()
    (output / "data_43.pt.0123456789abcdef.part").write_bytes(b"begun")

    text = command.start(output).wait()
    assert f"{len(killed)} of {SAMPLES} samples are done already" in text
    assert f"{SAMPLES - len(killed)} written now" in text
    same_files(output)

    before = {path: path.stat().st_mtime_ns for path in output.glob("data_*.pt")}
    text = command.start(output, VLLM_PLUGINS="none").wait()
    assert "0 written now" in text
    assert "captures layers" not in text  # no generator was made
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("data_*.pt")}


def test_shards_write_what_one_run_writes(
    command: Command, same_files: Callable[[Path], None], tmp_path: Path
) -> None:
    output = tmp_path / "states"
    # The borders of the first part are not those of batches.
    command.start(output, "--start", 3, "--end", 18).wait()
    assert sorted(files(output)) == sorted(f"data_{i}.pt" for i in range(3, 18))
    counts = json.loads((output / "manifest.json").read_text())["counts"]
    assert counts["missing"] == SAMPLES - 15
    command.start(output, "--shard", "1/2").wait()
    text = command.start(output).wait()
    assert "written now" in text
    same_files(output)


def test_other_settings_are_refused(command: Command, undisturbed: Path) -> None:
    before = files(undisturbed)
    text = command.start(undisturbed, "--layers", "1").wait(status=1)
    assert "settings.layer_ids [5, 1, 6] there, [1] now" in text
    text = command.start(undisturbed, "--max-samples", "7").wait(status=1)
    assert f"data.samples {SAMPLES} there, 7 now" in text or "counts the tokens" in text
    assert files(undisturbed) == before


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
            call(command, output)
    there = files(output)
    assert 0 < len(there) < SAMPLES
    assert not list(output.glob("*.part"))
    summary = call(command, output)
    assert summary.there == len(there)
    assert summary.written == SAMPLES - len(there)
    assert there.items() <= files(output).items()
    same_files(output)


def test_a_disk_that_is_really_full(command: Command, tmp_path: Path) -> None:
    output = tmp_path / "disk"
    output.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", output],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        text = command.start(output / "states").wait(status=1)
        assert "can't be written: the disk is full" in text
        there = files(output / "states")
        assert 0 < len(there) < SAMPLES
        for name in there:
            torch.load(output / "states" / name, weights_only=True)
        assert not list((output / "states").glob("*.part"))
    finally:
        subprocess.run(["umount", "-l", output], check=True)


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


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(x, y)
        for a, b in zip(one, other, strict=True)
        for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True)
    )
