"""``check``: each fault of a run's files, made in real files of torch.save."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_compat.checks.files import Check, check_directory, check_file
from vllm_compat.cli import main

LAYERS = [2, 4, 5, 7]
WIDTH = 64
FILES = 12


def sample(index: int) -> dict[str, Any]:
    """As a run of speculators' script writes it; norms grow with the layer."""
    generator = torch.Generator().manual_seed(index)
    n = 20 + 7 * index
    states = []
    for place in range(len(LAYERS)):
        rows = torch.randn(n, WIDTH, generator=generator) * (place + 1)
        rows[0] *= 100  # the attention sink
        states.append(rows.to(torch.bfloat16))
    return {
        "input_ids": torch.randint(0, 500, (n,), generator=generator),
        "hidden_states": states,
        "loss_mask": (torch.arange(n) > 5).long(),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lengths = {}
    for index in range(FILES):
        data = sample(index)
        torch.save(data, tmp_path / f"data_{index}.pt")
        lengths[str(index)] = len(data["input_ids"])
    config = {"data": {"num_samples": FILES}, "hidden_states": {"layer_ids": LAYERS}}
    (tmp_path / "data_config.json").write_text(json.dumps(config))
    (tmp_path / "sample_lengths.json").write_text(json.dumps(lengths))
    return tmp_path


def test_a_sound_run(run: Path) -> None:
    done: list[int] = []
    checked = check_directory(run, progress=done.append)
    assert checked.sound
    assert (checked.notes, checked.layer_ids) == ([], LAYERS)
    assert checked.tokens == sum(20 + 7 * i for i in range(FILES))
    assert sum(done) == checked.nbytes == sum(f.stat().st_size for f in run.glob("data_*.pt"))


def _only_fault(run: Path, index: int = 3) -> str:
    checked = check_directory(run)
    assert [s.name for s in checked.bad] == [f"data_{index}.pt"], checked
    assert not checked.missing
    assert not checked.wrong
    return "; ".join(checked.bad[0].wrong)


def _change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = torch.load(path, weights_only=True)
        changed = change(data)
        torch.save(changed if isinstance(changed, (dict, list)) else data, path)

    return damage


def _set(key: str, value: Any) -> Callable[[Path], None]:
    return _change(lambda data: data.__setitem__(key, value))


def _states(change: Callable[[list[torch.Tensor]], Any]) -> Callable[[Path], None]:
    return _change(lambda data: change(data["hidden_states"]))


def _write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _page_of_zeros(path: Path) -> None:
    """A block that was never written, as after a power failure."""
    content = bytearray(path.read_bytes())
    content[2048:3072] = bytes(1024)
    path.write_bytes(content)


def _value(place: int, position: int, value: float) -> Callable[[Path], None]:
    return _states(lambda states: states[place].__setitem__((position, 9), value))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (_write(b""), "is empty"),
    "text": (_write(b"no file of torch"), "no archive of torch.save"),
    "zeros": (_write(bytes(5000)), "beginning was never written"),
    "page of zeros": (_page_of_zeros, "is damaged: the checksum of record"),
    "a list": (_change(lambda data: [data]), "holds list"),
    "no mask": (_change(lambda data: {k: data[k] for k in list(data)[:2]}), "holds ["),
    "mask is None": (_set("loss_mask", None), "loss_mask is None"),
    "short mask": (
        _change(lambda d: d.__setitem__("loss_mask", d["loss_mask"][1:])),
        "loss_mask has [40] for 41 ids",
    ),
    "odd mask": (
        _change(lambda d: d["loss_mask"].__setitem__(3, 2)),
        "values other than 0 and 1",
    ),
    "short ids": (
        _change(lambda d: d.__setitem__("input_ids", d["input_ids"][1:])),
        "for 40 ids",
    ),
    "float ids": (
        _change(lambda d: d.__setitem__("input_ids", d["input_ids"].float())),
        "no list of token ids",
    ),
    "negative id": (_change(lambda d: d["input_ids"].__setitem__(3, -1)), "negative"),
    "no tokens": (
        _change(
            lambda d: {
                "input_ids": d["input_ids"][:0],
                "loss_mask": d["loss_mask"][:0],
                "hidden_states": [h[:0] for h in d["hidden_states"]],
            }
        ),
        "has no tokens",
    ),
    "states are a tensor": (
        _change(lambda d: d.__setitem__("hidden_states", torch.stack(d["hidden_states"]))),
        "no list of tensors",
    ),
    "no states": (_set("hidden_states", []), "hidden_states is empty"),
    "short states": (
        _states(lambda states: states.__setitem__(2, states[2][:-1])),
        "hidden_states[2] has [40, 64] torch.bfloat16 for 41 ids",
    ),
    "NaN": (_value(1, 17, float("nan")), "hidden_states[1], position 17: not finite"),
    "infinity": (_value(0, 0, float("inf")), "hidden_states[0], position 0: not finite"),
    "rows of zeros": (
        _states(lambda states: states[3][30:].zero_()),
        "hidden_states[3]: 11 rows of zeros, the first at position 30",
    ),
    "a layer less": (_states(lambda states: states.pop()), "has 3 layers"),
    "another width": (
        _states(lambda states: states.__setitem__(slice(None), [s[:, :32] for s in states])),
        "has 4 layers of 32 bfloat16; the others 4 layers of 64 bfloat16",
    ),
    "another dtype": (
        _states(lambda states: states.__setitem__(slice(None), [s.half() for s in states])),
        "64 float16; the others",
    ),
    "mixed dtypes": (
        _states(lambda states: states.__setitem__(0, states[0].float())),
        "layers differ in width or dtype",
    ),
    "layers swapped": (
        _states(lambda states: states.__setitem__(slice(None), states[::-1])),
        "layer 2: the median norm of its rows is 4 times that of the other files",
    ),
    "states scaled": (
        _states(lambda states: states[1].mul_(0.3)),
        "layer 4: the median norm of its rows is 0.31 times that of the other files",
    ),
    "one huge row": (
        _states(lambda states: states[2][5].mul_(1000)),
        "layer 5: the largest norm of its rows",
    ),
    "another sample's length": (
        _change(lambda d: {
            "input_ids": d["input_ids"][:30],
            "loss_mask": d["loss_mask"][:30],
            "hidden_states": [h[:30].clone() for h in d["hidden_states"]],
        }),
        "has 30 tokens; sample_lengths.json says 41",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_its_file(run: Path, fault: str) -> None:
    damage, sentence = FAULTS[fault]
    damage(run / "data_3.pt")
    assert sentence in _only_fault(run)


def test_a_file_that_was_cut_anywhere_is_found(run: Path) -> None:
    path = run / "data_3.pt"
    whole = path.read_bytes()
    for length in [*random.Random(0).sample(range(len(whole)), 60), len(whole) - 1]:
        path.write_bytes(whole[:length])
        (sentence,) = check_file(path).wrong
        assert "is cut off" in sentence or length < 4, length
        # As preallocated and not filled: the rest is zeros.
        path.write_bytes(whole[:length].ljust(len(whole), b"\0"))
        assert check_file(path).wrong or path.read_bytes() == whole, length


def test_a_changed_bit_is_found_by_its_checksum(run: Path) -> None:
    path = run / "data_3.pt"
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content = bytearray(path.read_bytes())
    content[largest.header_offset + 4000] ^= 1
    path.write_bytes(content)
    assert "checksum" in _only_fault(run)
    assert not check_file(path, checksums=False).wrong


def test_code_in_a_file_is_not_run(run: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "touched",)

    torch.save({**sample(3), "evil": Evil()}, run / "data_3.pt")
    assert "can't be read" in _only_fault(run)
    assert not (tmp_path / "touched").exists()


def test_missing_files_are_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in (0, 4, 5, 11):
        (run / f"data_{index}.pt").unlink()
    assert check_directory(run).missing == [0, 4, 5, 11]
    (run / "data_config.json").unlink()  # then the last one can't be known
    checked = check_directory(run)
    assert checked.missing == [0, 4, 5]
    assert "the run has not come to its end" in checked.notes[0]
    assert check_directory(run, expected=12).missing == [0, 4, 5, 11]
    assert main(["check", str(run), "--expect", "12"]) == 1
    assert "data_0.pt, data_4.pt to data_5.pt, data_11.pt" in capsys.readouterr().out


def test_a_file_too_many_is_named(run: Path) -> None:
    torch.save(sample(3), run / "data_12.pt")
    (sentence,) = check_directory(run).wrong
    assert sentence == "data_12.pt is beyond the 12 samples that there should be"


def test_an_empty_directory_is_not_sound(tmp_path: Path) -> None:
    assert check_directory(tmp_path).wrong == ["no data_*.pt here"]


def test_files_that_teach_nothing_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """speculators' script writes them; a run of nothing else is no run to train with."""

    def empty_mask(index: int) -> None:
        _change(lambda data: data["loss_mask"].zero_())(run / f"data_{index}.pt")

    empty_mask(3)
    empty_mask(4)
    assert main(["check", str(run)]) == 0
    out = capsys.readouterr().out
    assert "note: no token is trained on (loss_mask is 0) in data_3.pt to data_4.pt\n" in out
    assert "All are sound, but 2 teach nothing." in out
    assert main(["check", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["untrained"] == [3, 4]
    for index in range(FILES):
        empty_mask(index)
    assert main(["check", str(run)]) == 1
    out = capsys.readouterr().out
    assert "wrong: no token of any file is trained on" in out
    assert "NOT SOUND" in out


@pytest.mark.parametrize(
    "option", [("--threads", "-3"), ("--threads", "0"), ("--expect", "-1")]
)
def test_numbers_that_make_no_sense_are_a_usage_error(
    run: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", str(run), *option])
    assert ended.value.code == 2
    assert f"argument {option[0]}: {option[1]}: at least" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.startswith("vllm_compat.checks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert main(["check", str(run)]) == 1
    told = capsys.readouterr().err
    assert "the package torch is missing in this environment" in told
    assert "unexpected" not in told


def test_norms_of_few_files_are_not_judged(run: Path) -> None:
    for index in range(5, FILES):
        (run / f"data_{index}.pt").unlink()
    FAULTS["states scaled"][0](run / "data_3.pt")
    assert not check_directory(run, expected=5).bad


def test_texts_of_one_token_are_no_outliers(run: Path) -> None:
    """All that such a file has is the attention sink."""
    data = sample(3)
    for key in ("input_ids", "loss_mask"):
        data[key] = data[key][:1]
    data["hidden_states"] = [h[:1].clone() for h in data["hidden_states"]]
    torch.save(data, run / "data_3.pt")
    (run / "sample_lengths.json").unlink()
    assert check_directory(run).sound


def test_threads_agree(run: Path) -> None:
    FAULTS["NaN"][0](run / "data_3.pt")

    def outcome(checked: Check) -> Any:
        return [(s.name, s.wrong, s.norms) for s in checked.samples.values()]

    assert outcome(check_directory(run, threads=1)) == outcome(check_directory(run, threads=7))


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(run)]) == 0
    out = capsys.readouterr().out
    assert "12 files, 702 tokens, 4 layers of 64 bfloat16" in out
    assert out.endswith("All are sound.\n")
    FAULTS["NaN"][0](run / "data_3.pt")
    (run / "data_7.pt").unlink()
    assert main(["check", str(run)]) == 1
    out = capsys.readouterr().out
    assert "missing: data_7.pt" in out
    assert "data_3.pt: hidden_states[1], position 17: not finite" in out
    assert out.endswith("NOT SOUND: 1 bad, 1 missing.\n")
    assert "\x1b" not in out


def test_the_command_with_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FAULTS["empty"][0](run / "data_3.pt")
    assert main(["check", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] is False
    assert found["bad"] == [{"file": "data_3.pt", "tokens": 0, "wrong": ["is empty"]}]
    assert (found["files"], found["missing"], found["layer_ids"]) == (12, [], LAYERS)


def test_no_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.endswith("nothing is no directory.\n")


def _extracted(run: Path, folder: Path, failed: dict[int, str]) -> None:
    """The files of a run as `extract` leaves them, these samples having failed."""
    from vllm_compat.extract.manifest import Folder, Outcome

    with Folder(folder, {"versions": {}}, 0, FILES) as output:
        for index in range(FILES):
            if index in failed:
                output.note([Outcome(index, "failed", reason=failed[index])])
                continue
            path = folder / f"data_{index}.pt"
            (run / path.name).rename(path)
            tokens = 20 + 7 * index
            output.note([Outcome(index, "written", tokens, path.stat().st_size)])
        output.finish(FILES)


def test_what_extract_could_not_compute_is_not_missing(
    run: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("extracted")
    _extracted(run, folder, {3: "ids outside of the vocabulary", 11: "too long"})
    (folder / "data_config.json").write_text((run / "data_config.json").read_text())
    assert main(["check", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "note: data_3.pt was not written: ids outside of the vocabulary\n" in shown
    assert "missing" not in shown
    assert "All are sound, but 2 could not be computed." in shown

    (folder / "data_5.pt").unlink()
    assert main(["check", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["missing"] == [5]
    assert found["failed"] == {"3": "ids outside of the vocabulary", "11": "too long"}


def test_the_manifest_says_how_many_there_should_be(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("extracted")
    _extracted(run, folder, {})
    for index in (0, FILES - 1):
        (folder / f"data_{index}.pt").unlink()
    assert check_directory(folder).missing == [0, FILES - 1]


def test_a_sample_that_failed_once_and_is_there_is_looked_at(run: Path) -> None:
    (run / "manifest.json").write_text(json.dumps({"failed": {"3": "an old reason"}}))
    (run / "data_3.pt").write_bytes(b"")
    checked = check_directory(run)
    assert checked.failed == {}
    assert [s.name for s in checked.bad] == ["data_3.pt"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"failed": [3], "counts": 3}', '{"failed": {"x": 1}}']
)
def test_a_manifest_of_another_form_does_no_harm(run: Path, content: str) -> None:
    (run / "manifest.json").write_text(content)
    checked = check_directory(run)
    assert checked.sound
    assert (len(checked.notes) == 1) == (content in ("{", "[]"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (5, 576), (300, 4096), (3, 100_000)])
def test_norms_in_pieces(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from vllm_compat.checks.one_file import _norms

    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
    torch.testing.assert_close(_norms(rows), whole)
