"""What a folder remembers, and what it refuses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.extract import OutputConflictError
from vllm_compat.extract.files import packed, write_whole
from vllm_compat.extract.manifest import Folder, Outcome

FACTS: dict[str, Any] = {
    "model": {"path": "/models/a", "identity": "contents:1"},
    "data": {"path": "a.jsonl", "samples": 10, "tokens": 100, "identity": "d"},
    "settings": {"layer_ids": [1, 2], "seq_length": 16, "batch_size": 4},
    "versions": {"vllm": "0.16.0", "torch": "2.10.0"},
}
TOKENS = [5] * 10


def written(folder: Path, index: int) -> Outcome:
    data = packed({"input_ids": torch.arange(5), "hidden_states": [], "loss_mask": None})
    write_whole(folder / f"data_{index}.pt", data)
    return Outcome(index, "written", 5, len(data))


def test_a_run_finds_what_another_left(tmp_path: Path) -> None:
    with Folder(tmp_path, FACTS, 0, 10) as there:
        there.note([written(tmp_path, 0), Outcome(1, "failed", reason="is empty")])
        written(tmp_path, 2)  # stopped before it was noted
        (tmp_path / "data_3.pt.00ff.part").write_bytes(b"half")
    with Folder(tmp_path, FACTS, 0, 10) as there:
        found = there.scan(TOKENS)
        assert {i: o.status for i, o in found.items()} == {
            0: "written", 1: "failed", 2: "written",
        }  # fmt: skip
        assert found[2].tokens == 5
        assert not (tmp_path / "data_3.pt.00ff.part").exists()
        assert 1 not in there.scan(TOKENS, retry_failed=True)
        assert there.finish(10)["missing"] == 7
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["failed"] == {"1": "is empty"}
    assert json.loads((tmp_path / "sample_lengths.json").read_text()) == {"0": 5, "2": 5}


def test_what_a_killed_writer_had_begun_goes_when_another_wrote_the_sample(
    tmp_path: Path,
) -> None:
    with Folder(tmp_path, FACTS, 0, 5) as there:
        there.scan(TOKENS)
        for index in (0, 1, 7):  # 1: not written yet; 7: another run's
            (tmp_path / f"data_{index}.pt.00ff.part").write_bytes(b"half")
        there.note([written(tmp_path, 0)])
        there.finish(10)
    left = sorted(path.name for path in tmp_path.glob("*.part"))
    assert left == ["data_1.pt.00ff.part", "data_7.pt.00ff.part"]


def test_files_that_are_not_as_they_were_written_count_as_missing(tmp_path: Path) -> None:
    with Folder(tmp_path, FACTS, 0, 10) as there:
        there.note([written(tmp_path, 0), written(tmp_path, 1)])
        written(tmp_path, 2)
    for index in (0, 2):  # one that was noted, one that wasn't
        path = tmp_path / f"data_{index}.pt"
        path.write_bytes(path.read_bytes()[:-100])
    with Folder(tmp_path, FACTS, 0, 10) as there:
        assert set(there.scan(TOKENS)) == {1}


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    with Folder(tmp_path, FACTS, 0, 10) as there:
        there.note([Outcome(4, "failed", reason="too long")])
    journal = tmp_path / "manifest.d" / "samples-0-10.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"index": 5, "fai')
    with Folder(tmp_path, FACTS, 0, 10) as there:
        there.note([Outcome(6, "failed", reason="is empty")])
        assert set(there.scan(TOKENS)) == {4, 6}


def begun(folder: Path, facts: dict[str, Any] = FACTS) -> None:
    """A folder with one file, as a run that was stopped leaves it."""
    with Folder(folder, facts, 0, 10) as there:
        there.note([written(folder, 0)])


def changed(*where: str, to: object) -> dict[str, Any]:
    other = copy.deepcopy(FACTS)
    other[where[0]][where[1]] = to
    return other


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("model", "identity"), "contents:2"),
        (("data", "identity"), "e"),
        (("settings", "layer_ids"), [2, 1]),
        (("settings", "seq_length"), 17),
        (("versions", "vllm"), "0.17.0"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, where: tuple[str, str], value: object
) -> None:
    begun(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    other = changed(*where, to=value)
    with pytest.raises(OutputConflictError, match=rf"{where[0]}\.{where[1]} .* there"):
        Folder(tmp_path, other, 0, 10)
    assert (tmp_path / "manifest.json").read_bytes() == before


def test_a_run_without_a_file_claims_nothing(tmp_path: Path) -> None:
    """Whatever it was stopped by: the settings can be corrected."""
    with Folder(tmp_path, FACTS, 0, 10) as there:
        assert there.finish(10)["missing"] == 10
    assert not (tmp_path / "manifest.json").exists()
    corrected = changed("settings", "layer_ids", to=[0, 1])
    with Folder(tmp_path, corrected, 0, 10) as there:
        assert not (tmp_path / "manifest.json").exists()
        there.note([written(tmp_path, 4)])
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        assert manifest["settings"]["layer_ids"] == [0, 1]
    with pytest.raises(OutputConflictError, match="layer_ids"):
        Folder(tmp_path, FACTS, 0, 10)


def test_a_folder_that_0_1_0_claimed_without_a_file_is_free(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, **FACTS}))
    Folder(tmp_path, changed("settings", "layer_ids", to=[0, 1]), 0, 10).close()


def test_failures_of_other_settings_are_forgotten(tmp_path: Path) -> None:
    with Folder(tmp_path, FACTS, 0, 10) as there:
        there.note([Outcome(4, "failed", reason="too long")])
        there.finish(10)
    with Folder(tmp_path, FACTS, 0, 10) as there:
        assert set(there.scan(TOKENS)) == {4}
    with Folder(tmp_path, changed("settings", "seq_length", to=99), 0, 10) as there:
        assert there.scan(TOKENS) == {}


def test_a_file_that_was_written_before_the_manifest_belongs_to_its_run(tmp_path: Path) -> None:
    """Killed between the two."""
    with Folder(tmp_path, FACTS, 0, 10):
        written(tmp_path, 0)
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(OutputConflictError, match="layer_ids"):
        Folder(tmp_path, changed("settings", "layer_ids", to=[3]), 0, 10)
    with Folder(tmp_path, FACTS, 0, 10) as there:
        assert set(there.scan(TOKENS)) == {0}
    assert json.loads((tmp_path / "manifest.json").read_text())["model"] == FACTS["model"]


def test_a_run_that_has_no_file_yet_is_not_pushed_aside(tmp_path: Path) -> None:
    """Locks are between processes, so the other run is one."""
    script = f"""
        from pathlib import Path
        from vllm_compat.extract.manifest import Folder
        from vllm_compat.extract import OutputConflictError
        try:
            Folder(Path({str(tmp_path)!r}), {changed("settings", "layer_ids", to=[3])!r}, 4, 10)
        except OutputConflictError as error:
            print(error)
    """
    with Folder(tmp_path, FACTS, 0, 4):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert "layer_ids [1, 2] there, [3] now" in done.stdout


def test_what_makes_no_difference_is_not_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    with Folder(tmp_path, changed("model", "path", to="/elsewhere/a"), 0, 4) as there:
        assert there.notes == []


@pytest.mark.parametrize("name", ["batch_size", "tensor_parallel_size", "cpus_per_replica"])
def test_what_decides_about_last_bits_is_noted_and_not_refused(
    tmp_path: Path, name: str
) -> None:
    """The manifest is one of 0.1.0, which has them among its settings."""
    old = changed("settings", name, to=1)
    begun(tmp_path, old)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, **old}))
    with Folder(tmp_path, changed("settings", name, to=2), 0, 10) as there:
        (note,) = there.notes
        assert f"computed with {name} 1, not 2" in note
        assert "last bits" in note
    also = json.loads((tmp_path / "manifest.json").read_text())["also_settings"]
    assert [each[name] for each in also] == [2]
    with Folder(tmp_path, FACTS | {"settings": {**FACTS["settings"]}}, 0, 10) as there:
        pass  # a run that does not say


def test_other_versions_only_if_asked_for(tmp_path: Path) -> None:
    begun(tmp_path)
    other = copy.deepcopy(FACTS)
    other["versions"]["vllm"] = "0.17.0"
    with pytest.raises(OutputConflictError, match="--mixed-versions"):
        Folder(tmp_path, other, 0, 10)
    Folder(tmp_path, other, 0, 10, mixed_versions=True).close()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["versions"]["vllm"] == "0.16.0"
    assert [v["vllm"] for v in manifest["also_versions"]] == ["0.17.0"]
    other["settings"]["seq_length"] = 17
    with pytest.raises(OutputConflictError, match="seq_length"):
        Folder(tmp_path, other, 0, 10, mixed_versions=True)


def test_files_of_another_program_are_refused(tmp_path: Path) -> None:
    written(tmp_path, 0)
    with pytest.raises(OutputConflictError, match="another program"):
        Folder(tmp_path, FACTS, 0, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["data_0.pt"]


def test_two_runs_share_a_folder_only_with_other_samples(tmp_path: Path) -> None:
    """Locks are between processes, so the other run is one."""
    script = f"""
        from pathlib import Path
        from vllm_compat.extract.manifest import Folder
        from vllm_compat.extract import OutputConflictError
        for start, end in ((0, 4), (3, 5), (4, 10)):
            try:
                Folder(Path({str(tmp_path)!r}), {FACTS!r}, start, end).close()
                print(start, end, "taken")
            except OutputConflictError as error:
                print(start, end, "refused")
    """
    with Folder(tmp_path, FACTS, 0, 4):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert done.stdout.splitlines() == ["0 4 refused", "3 5 refused", "4 10 taken"]


def test_the_last_shard_to_finish_counts_all(tmp_path: Path) -> None:
    with Folder(tmp_path, FACTS, 0, 4) as first:
        first.note([written(tmp_path, i) for i in range(4)])
        first.finish(10)
    # Locks don't keep one process from itself, which is why this is possible here.
    with Folder(tmp_path, FACTS, 4, 10) as second:
        second.note([written(tmp_path, i) for i in range(4, 9)])
        second.note([Outcome(9, "failed", reason="is empty")])
        second.finish(10, ["cpu"])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["counts"] == {"samples": 10, "written": 9, "missing": 0, "failed": 1}
    assert list(json.loads((tmp_path / "sample_lengths.json").read_text())) == [
        str(i) for i in range(9)
    ]
