"""Identities, samples, shards and cores."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_compat.extract import ExtractError, OutputConflictError
from vllm_compat.extract.cores import Cores
from vllm_compat.extract.job import model_identity
from vllm_compat.extract.plan import batches, part
from vllm_compat.extract.run import _cores
from vllm_compat.extract.samples import Samples, keep_frequencies, prepare
from vllm_compat.worker_environment import cores_of_workers, variables

from .support import SAMPLES, Command, make_checkpoint


def test_a_checkpoint_is_known_by_its_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, seed=1)
    before = model_identity(str(folder))
    (folder / "README.md").write_text("changed")
    assert model_identity(str(folder)) == before
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.4.mlp.up_proj.weight"] *= 1.0 + 2**-7  # a training step
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert model_identity(str(folder)) != before


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExtractError, match=r"no config\.json"):
        model_identity(str(tmp_path))
    with pytest.raises(ExtractError, match="neither a folder nor"):
        model_identity("nobody/no-such-model")


def test_samples_are_those_of_speculators(command: Command, tmp_path: Path) -> None:
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    cache = str(command.work / "datasets")
    frequencies = tmp_path / "token_freq.pt"
    mine = prepare(
        str(command.checkpoint), str(command.conversations),
        seq_length=1024, seed=5, max_samples=20, cache_dir=cache, workers=1,
    )  # fmt: skip
    dataset, _ = load_and_preprocess_dataset(
        str(command.checkpoint), str(command.conversations),
        seq_length=1024, seed=5, max_samples=20, cache_dir=cache,
        token_freq_path=str(tmp_path / "theirs.pt"), build_dataset_num_proc=1,
    )  # fmt: skip
    assert len(mine) == len(dataset) == 20
    for index, row in enumerate(dataset):
        ids, mask = mine.sample(index)
        assert ids.tolist() == row["input_ids"].tolist()
        assert mask.tolist() == row["loss_mask"].tolist()
        assert mine.length(index) == len(row["input_ids"])
    assert mine.unused == 0
    keep_frequencies(mine.frequencies, frequencies, ours=False)
    assert torch.load(frequencies) == torch.load(tmp_path / "theirs.pt")


def test_frequencies_of_other_data_are_not_kept(tmp_path: Path) -> None:
    frequencies, counted = tmp_path / "a" / "token_freq.pt", tmp_path / "counted.pt"
    torch.save({1: 2}, counted)
    keep_frequencies(counted.read_bytes(), frequencies, ours=False)
    keep_frequencies(counted.read_bytes(), frequencies, ours=False)
    torch.save({1: 3}, counted)
    with pytest.raises(OutputConflictError, match="counts the tokens of other data"):
        keep_frequencies(counted.read_bytes(), frequencies, ours=False)
    keep_frequencies(counted.read_bytes(), frequencies, ours=True)
    assert torch.load(frequencies) == {1: 3}


def test_dropped_turns_depend_on_the_seed_alone(command: Command, tmp_path: Path) -> None:
    identities = [
        prepare(
            str(command.checkpoint), str(command.conversations), seq_length=1024,
            turn_dropout=True, seed=seed, workers=1, cache_dir=str(tmp_path / f"cache{number}"),
        ).identity
        for number, seed in enumerate((1, 1, 2))
    ]  # fmt: skip
    assert identities[0] == identities[1] != identities[2]


def test_data_that_can_not_be_read(command: Command, tmp_path: Path) -> None:
    with pytest.raises(ExtractError, match=r"There is no file .*none\.jsonl"):
        prepare(str(command.checkpoint), str(tmp_path / "none.jsonl"), seq_length=64)
    with pytest.raises(ExtractError, match="Unsupported dataset"):
        prepare(str(command.checkpoint), "no-such-set", seq_length=64)


def test_identity_sees_ids_masks_and_borders() -> None:
    one = Samples.of([[1, 2], [3]], [[0, 1], [1]])
    assert one.identity == Samples.of([[1, 2], [3]], [[0, 1], [1]]).identity
    for other in (
        Samples.of([[1, 2], [4]], [[0, 1], [1]]),
        Samples.of([[1, 2], [3]], [[1, 1], [1]]),
        Samples.of([[1], [2, 3]], [[0], [1, 1]]),
    ):
        assert other.identity != one.identity
    assert numpy.array_equal(one.sample(1)[0], [3])


def test_shards_are_whole_batches_and_all_of_them() -> None:
    for total, batch, parts in ((44, 4, 3), (45, 4, 3), (7, 2, 4), (1000, 8, 7)):
        ends = [part(total, batch, None, None, (p, parts)) for p in range(parts)]
        assert ends[0][0] == 0
        assert ends[-1][1] == total
        assert all(a[1] == b[0] and a[1] % batch == 0 for a, b in itertools.pairwise(ends))
    with pytest.raises(ExtractError, match="the first of 3 is 0/3"):
        part(10, 2, None, None, (3, 3))
    low, high = part(4, 4, None, None, (0, 3))
    assert low == high
    with pytest.raises(ExtractError, match="can't be given together"):
        part(10, 2, 1, None, (0, 3))


def test_a_batch_is_the_same_whatever_part_of_it_is_wanted() -> None:
    (first, second) = batches(5, 11, SAMPLES, 4, {})
    assert (first.start, first.end, first.wanted) == (4, 8, (5, 6, 7))
    assert (second.start, second.end, second.wanted) == (8, 12, (8, 9, 10))


def test_the_number_of_cores_is_a_setting_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))

    def cores(*given: Any) -> Any:
        return _cores(*given).get("cpus_per_replica")

    assert cores(3, 2, None) == 3
    assert cores(None, 2, None) == 4
    assert cores(None, 1, None) == "all of 8"
    assert cores(None, 2, "auto") == "the cluster's, shared by 2"
    monkeypatch.setattr("vllm_compat.extract.run.on_cpu", lambda: False)
    assert cores(None, 2, None) is None


def test_a_core_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    allowed = sorted(os.sched_getaffinity(0))
    mine = Cores(len(allowed), wait=0)
    assert mine.ids == allowed
    assert Cores(1, wait=0).ids == []
    mine.release()
    assert Cores(1, wait=0).ids == allowed[:1]
    assert Cores(len(allowed) + 1, wait=60).ids == []  # at once: there are no more


def test_cores_come_back_when_their_owner_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = """
        import os, sys, time
        from vllm_compat.extract.cores import Cores
        mine = Cores(len(os.sched_getaffinity(0)), wait=0)
        print(len(mine.ids), flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        assert int(owner.stdout.readline()) == len(os.sched_getaffinity(0))
        assert Cores(1, wait=0).ids == []
        owner.kill()
        owner.wait()
        assert len(Cores(1).ids) == 1


def test_binding_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with variables(cores_of_workers([2, 3, 4, 5], workers=2, count=4)):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,3|4,5"
        assert os.environ["OMP_NUM_THREADS"] == "2"
    with variables(cores_of_workers([], workers=1, count=3)):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "7"
    assert "OMP_NUM_THREADS" not in os.environ
