"""``verify`` on real engines: right states pass, and rows that were moved are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version

from vllm_compat.batch import Batch
from vllm_compat.checks import reference
from vllm_compat.checks.reference import transformers_states
from vllm_compat.cli import CommandError, main, verify
from vllm_compat.cli.prompts import built_in_prompts, read_prompts
from vllm_compat.cli.verify import _reference_dtype
from vllm_compat.errors import UnsupportedModelError

from . import rope_models
from .conftest import in_other_words

LAYERS = ["1", "7"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.mark.engine
def test_right_states_pass(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "errors.html"
    words = ["verify", "--model", str(model), "--layers", *LAYERS, "--plot", str(page)]
    assert main(words) == 0
    out = capfd.readouterr().out
    assert "vLLM against transformers (float32), 15 prompts" in out.splitlines()[0]
    assert out.endswith("Every row is right.\n")
    rows = [line.split() for line in out.splitlines()]
    (mean,) = [float(row[1]) for row in rows if row and row[0] == "7" and row[2] == "%"]
    assert 0.1 < mean < 2
    assert "<svg" in page.read_text()


def _moved(monkeypatch: pytest.MonkeyPatch, sequence: int) -> None:
    """Rows 20 to 39 of one sequence of a batch, at all layers, are those 3 further on."""
    result = Batch.result

    def moved(self: Batch, index: int) -> list[torch.Tensor]:
        states = result(self, index)
        if index == sequence and len(self.prompts) > 1:
            for rows in states:
                rows[20:40] = rows[23:43].clone()
        return states

    monkeypatch.setattr(Batch, "result", moved)


@pytest.mark.engine
@pytest.mark.parametrize("batch_only", [False, True])
def test_a_shift_is_found(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    batch_only: bool,
) -> None:
    _moved(monkeypatch, sequence=11)
    words = ["verify", "--model", str(model), "--layers", *LAYERS, "--json"]
    assert main([*words, *["--batch-only"][:batch_only]]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["right"] is False
    assert found["against"].startswith("one batch" if batch_only else "vLLM against")
    assert found["moved"] == [
        {"prompt": 11, "layer": int(k), "first": 20, "last": 39, "whose": 11, "shift": 3}
        for k in LAYERS
    ]
    assert found["wrong"][0] == (
        "prompt 11, layer 1: positions 20 to 39 hold the rows of positions 23 to 42 "
        "(shifted by +3)"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--layers", "8"], "layer 8 is outside of [0, 7]"),
        (["--prompts", "nothing.txt"], "can't read the prompts in nothing.txt"),
        (["--plot", "errors.pdf"], "a plot is a .html or a .png file"),
        (["--model", "/no/model"], "There is no folder /no/model"),
    ],
)
def test_errors_come_before_the_engine(
    model: Path, capfd: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert main(["verify", "--model", str(model), *words]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert sentence in captured.err.splitlines()[-1]


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def test_prompts_of_files(model: Path, tmp_path: Path) -> None:
    tokenizer = _tokenizer(model)

    def read(name: str, text: str, longest: int = 99) -> list[list[int]]:
        (tmp_path / name).write_text(text)
        return read_prompts(tmp_path / name, tokenizer, longest)

    assert read("a.txt", "t1 t2\n\nt3\n") == [[1, 2], [3]]
    rows = [
        {"input_ids": [5, 6]},
        {"prompt_token_ids": [7]},
        {"prompt": "t8 t9"},
        {"text": "t1"},
        [4, 5],
        "t2 t3",
    ]
    expected = [[5, 6], [7], [8, 9], [1], [4, 5], [2, 3]]
    assert read("a.jsonl", "\n".join(map(json.dumps, rows))) == expected
    assert read("a.json", json.dumps(rows)) == expected
    assert read("cut.json", json.dumps([[1, 2, 3, 4]]), longest=3) == [[1, 2, 3]]
    turns = [("human", "user", "t7"), ("gpt", "assistant", "t8")]
    chats = [
        {"conversations": [{"from": name, "value": text} for name, _, text in turns]},
        {"messages": [{"role": role, "content": text} for _, role, text in turns]},
    ]
    one, other = read("chat.jsonl", "\n".join(map(json.dumps, chats)))
    assert one == other
    assert [i for i in one if i in (7, 8)] == [7, 8]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "\n", "has no prompts"),
        ("a.jsonl", "{", "is not JSON"),
        ("a.jsonl", '{"input_ids": []}', "prompt 1: it has no tokens"),
        ("a.jsonl", '{"prompt": "t1"}\n{"other": 1}', "prompt 2: an object with input_ids"),
        ("a.jsonl", '{"messages": [3]}', "no conversation for this tokenizer"),
    ],
)
def test_prompts_that_are_none(
    model: Path, tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CommandError, match=sentence):
        read_prompts(tmp_path / name, _tokenizer(model), 99)


def test_built_in_prompts_fit_any_model(model: Path) -> None:
    prompts = built_in_prompts(_tokenizer(model), 512, 100)
    assert len(prompts) > 11  # speculators 0.4.0 mixes up results from there on
    assert {len(p) for p in prompts} >= {1, 2, 15, 16, 17, 100}
    assert max(map(len, prompts)) == 100
    assert len({i for p in prompts for i in p}) > 100
    beginnings = [tuple(p[:15]) for p in prompts if len(p) >= 15]
    assert len(set(beginnings)) < len(beginnings)  # for a prefix cache to hit
    assert built_in_prompts(_tokenizer(model), 512, 100) == prompts


def test_the_reference_has_to_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from argparse import Namespace

    from vllm_compat.cli import machine

    parsed = Namespace(model=str(model), reference_dtype="auto", reference_device="cpu")
    size = sum(f.stat().st_size for f in model.glob("*.safetensors"))

    def available(nbytes: float) -> None:
        monkeypatch.setattr(machine, "memory", lambda: machine.Memory(0, int(nbytes / 0.9)))

    available(2.1 * size)
    assert _reference_dtype(parsed) == torch.float32
    available(1.5 * size)
    assert _reference_dtype(parsed) == torch.bfloat16
    available(0.9 * size)
    with pytest.raises(CommandError, match="use --batch-only"):
        _reference_dtype(parsed)


# -- rotary embeddings that depend on the length --


def _data_config(folder: Path, seq_length: int, layer_ids: list[int]) -> Path:
    """What speculators' script leaves behind, as far as it is read here."""
    folder.mkdir()
    config = {"data": {"seq_length": seq_length}, "hidden_states": {"layer_ids": layer_ids}}
    (folder / "data_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.engine
def test_dynamic_is_compared_with_what_vllm_means(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = rope_models.dynamic(tmp_path / "dynamic")
    words = ["verify", "--model", str(model), "--layers", "0", "3", "--max-model-len", "65"]
    assert main([*words, "--json"]) == 0, capfd.readouterr().out
    found = json.loads(capfd.readouterr().out)
    assert found["right"] is True
    if Version(vllm.__version__) >= Version("0.22"):  # the plain embedding there
        assert found["rope"] is None
        assert main([*words[:-1], "66"]) == 1
        assert "ends after 64 positions" in capfd.readouterr().err
        return
    assert found["against"] == (
        "vLLM against transformers (float32) with the rotary embedding of 256 tokens"
    )
    assert found["rope"] == (
        "rope_scaling 'dynamic': the states are those that vLLM serves with max_model_len=65; "
        "transformers computes prompts of fewer than 256 tokens otherwise."
    )
    assert f"vllm-compat: {found['rope']}" in caplog.messages


@pytest.mark.engine
def test_longrope_is_compared_with_what_vllm_means(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = rope_models.longrope(tmp_path / "longrope")
    states = _data_config(tmp_path / "states", 400, [3, 0])
    assert main(["verify", "--model", str(model), "--states", str(states), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["layers"], found["max_model_len"]) == ([3, 0], 400)
    assert found["against"].endswith(" with the rotary embedding of 513 tokens")
    note = (
        "rope_scaling 'longrope': the states are those that vLLM serves with max_model_len=400;"
        " transformers computes prompts of up to 64 tokens otherwise."
    )
    assert found["rope"] == note
    assert f"vllm-compat: {note}" in caplog.messages

    # transformers' own values, and the short factors in vLLM, are far away from these.
    words = ["verify", "--model", str(model), "--layers", "3", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_check_last", lambda states, last: None)
        patch.setattr(verify, "_rope_length", lambda rope: None)
        assert main([*words, "--max-model-len", "400", "--max-len", "60"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert found["by_layer"][0]["mean"] > 0.1

    caplog.clear()
    assert main([*words, "--max-model-len", "64"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["rope"] is None
    assert found["against"] == "vLLM against transformers (float32)"
    assert not [m for m in caplog.messages if "rope_scaling" in m]


@pytest.mark.engine
def test_positions_that_vllm_has_no_rotation_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    model = rope_models.dynamic(tmp_path / "dynamic")
    words = ["verify", "--model", str(model), "--layers", "3", "--max-model-len", "300"]
    assert main(words) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert "max_model_len=300: the rotary embedding of this vLLM" in last
    assert "states beyond them would be computed from whatever lies behind it" in last


@pytest.mark.engine
def test_a_rotary_embedding_without_a_reference(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = rope_models.yarn(tmp_path / "yarn")
    words = ["verify", "--model", str(model), "--layers", "3", "--max-model-len", "100"]
    if Version(vllm.__version__) >= Version("0.30"):
        assert main(words) == 0
        return
    assert main(words) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert "can't be decided: rope_scaling 'yarn'" in last
    assert "the rotary embedding of this vLLM isn't transformers', for no length" in last


def test_the_reference_takes_the_rotation_of_a_longer_sequence(tmp_path: Path) -> None:
    """One token at the far position does what as many tokens would do."""
    model = rope_models.longrope(tmp_path / "longrope")
    prompt = built_in_prompts(_tokenizer(model), 509, 20)[-1]
    plain = transformers_states(model, [0, 3], torch.float32)
    far = transformers_states(model, [0, 3], torch.float32, rope_length=200)
    padded = plain([*prompt, *[7] * (200 - len(prompt))])
    for states, own, long in zip(far(prompt), plain(prompt), padded, strict=True):
        torch.testing.assert_close(states, long[: len(prompt)], rtol=1e-4, atol=1e-4)
        assert float((states - own).norm() / own.norm()) > 0.05


def test_a_reference_that_cannot_be_told_the_length(model: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="doesn't take the length"):
        transformers_states(model, [0], torch.float32, rope_length=2000)


# -- configs in other words --


@pytest.mark.parametrize("kind", ["chatglm", "internvl"])
def test_configs_in_other_words(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    folder = in_other_words(model, tmp_path / kind, kind)
    assert main(["verify", "--model", str(folder), "--layers", "99"]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.endswith("layer 99 is outside of [0, 7]: the model has 8 layers.")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "There is no folder {}."),
        ((), "{} is no checkpoint: it has no config.json."),
        (("config.json",), "{} has no tokenizer"),
    ],
)
def test_models_that_are_none(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], files: Any, sentence: str
) -> None:
    folder = tmp_path / "some" / "model"
    if files is not None:
        folder.mkdir(parents=True)
        for name in files:
            shutil.copy(model / name, folder)
    for command in (["verify"], ["estimate", "--data", "sharegpt"]):
        assert main([*command, "--model", str(folder)]) == 1
        captured = capfd.readouterr()
        assert captured.out == ""
        last = captured.err.splitlines()[-1]
        assert last.startswith(f"vllm-compat {command[0]}: {sentence.format(folder)}")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (None, "", "has neither manifest.json nor data_config.json."),
        ("data_config.json", "{}", "data_config.json doesn't say seq_length and layer_ids"),
        ("manifest.json", "{", "manifest.json doesn't say seq_length and layer_ids"),
    ],
)
def test_folders_that_do_not_say(
    model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str | None,
    text: str,
    sentence: str,
) -> None:
    if name is not None:
        (tmp_path / name).write_text(text)
    assert main(["verify", "--model", str(model), "--states", str(tmp_path)]) == 1
    assert sentence in capfd.readouterr().err.splitlines()[-1]
