"""Files are written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from vllm_compat.extract import DiskError
from vllm_compat.extract.files import data_files, is_whole, leftovers, packed, write_whole


def sample(tokens: int = 50) -> dict[str, object]:
    return {
        "input_ids": torch.arange(tokens),
        "hidden_states": [torch.randn(tokens, 8).to(torch.bfloat16)],
        "loss_mask": torch.ones(tokens, dtype=torch.long),
    }


def test_a_file_is_what_torch_saves(tmp_path: Path) -> None:
    there = sample()
    write_whole(tmp_path / "data_3.pt", packed(there))
    back = torch.load(tmp_path / "data_3.pt", weights_only=True)
    assert torch.equal(back["hidden_states"][0], there["hidden_states"][0])
    assert torch.equal(back["input_ids"], there["input_ids"])
    assert list(data_files(tmp_path)) == [(3, (tmp_path / "data_3.pt").stat().st_size)]
    assert list(leftovers(tmp_path)) == []


def test_the_bytes_depend_on_the_values_alone() -> None:
    there = sample()
    again = {k: [t.clone() for t in v] if isinstance(v, list) else v.clone()
             for k, v in there.items()}  # fmt: skip
    assert bytes(packed(there)) == bytes(packed(again))


@pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
def test_nothing_is_left_of_a_file_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A fault-injecting stand-in for the disk: ENOSPC from each call in turn."""
    (tmp_path / "data_1.pt").write_bytes(b"before")

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"vllm_compat.extract.files.os.{fails}", full)
    with pytest.raises(DiskError, match=r"data_1\.pt can't be written: the disk is full"):
        write_whole(tmp_path / "data_1.pt", b"x" * 1000)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["data_1.pt"]
    assert (tmp_path / "data_1.pt").read_bytes() == b"before"


def test_a_limit_on_file_sizes_is_told(tmp_path: Path) -> None:
    """The kernel's own refusal (RLIMIT_FSIZE), in a process of its own."""
    script = f"""
        import resource
        from pathlib import Path
        from vllm_compat.extract.errors import DiskError
        from vllm_compat.extract.files import write_whole
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        write_whole(Path({str(tmp_path)!r}) / "data_0.pt", b"x" * 4000)
        try:
            write_whole(Path({str(tmp_path)!r}) / "data_1.pt", b"x" * 6000)
        except DiskError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "limit for files" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["data_0.pt"]


def test_a_cut_file_is_known(tmp_path: Path) -> None:
    path = tmp_path / "data_0.pt"
    data = bytes(packed(sample()))
    path.write_bytes(data)
    assert is_whole(path)
    path.write_bytes(data[:-300])
    assert not is_whole(path)


def test_training_never_reads_a_begun_file(tmp_path: Path) -> None:
    """speculators' training takes every file whose name ends with "pt"."""
    from speculators.train.data import list_files

    begun = tmp_path / "data_7.pt.0123456789abcdef.part"
    begun.write_bytes(b"half")
    assert [index for index, _ in leftovers(tmp_path)] == [7]
    assert list_files(str(tmp_path)) == []


@pytest.mark.engine
@pytest.mark.slow
def test_nothing_of_the_folder_is_read_by_training(undisturbed: Path) -> None:
    from speculators.train.data import list_files

    names = {os.path.basename(path) for path in list_files(str(undisturbed))}
    assert names == {path.name for path in undisturbed.glob("data_*.pt")}
