"""The demo: its conversations, the checker that its verdict rests on, and the whole of it.

The checker is tested on files that are right and then broken in one way each, with a
small Llama of random weights run by transformers; nothing there needs an engine.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DEMO = Path(__file__).resolve().parent.parent / "examples" / "smollm2_states"
LAYERS = [0, 2, 3]


def load(name: str) -> ModuleType:
    """A module of the example, under a name that can't meet another module's."""
    spec = importlib.util.spec_from_file_location(f"smollm2_states_{name}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


check = load("check")


# The conversations


@pytest.fixture(scope="module")
def conversations() -> list[dict[str, Any]]:
    lines = (DEMO / "conversations.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_conversations_have_sharegpt_form(conversations: list[dict[str, Any]]) -> None:
    assert 38 <= len(conversations) <= 45
    assert len({conversation["id"] for conversation in conversations}) == len(conversations)
    for conversation in conversations:
        turns = conversation["conversations"]
        roles = [turn["from"] for turn in turns]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["human", "gpt"] * (len(roles) // 2), conversation["id"]
        assert len(roles) >= 2
        assert all(turn["value"].strip() for turn in turns)


def test_conversations_are_varied(conversations: list[dict[str, Any]]) -> None:
    """Short and long, one turn and many, code, system prompts, and several scripts."""
    texts = [
        "\n".join(turn["value"] for turn in conversation["conversations"])
        for conversation in conversations
    ]
    lengths = sorted(map(len, texts))
    assert lengths[0] < 20
    assert lengths[-1] > 4000
    assert sum(length > 1000 for length in lengths) >= 8
    turns = [len(conversation["conversations"]) for conversation in conversations]
    assert sum(count >= 6 for count in turns) >= 6
    assert sum("```" in text for text in texts) >= 8
    assert sum(c["conversations"][0]["from"] == "system" for c in conversations) >= 6, (
        "system prompts"
    )
    scripts = {
        unicodedata.name(letter, "?").split()[0]
        for letter in "".join(texts)
        if letter.isalpha()
    }
    assert scripts >= {"LATIN", "CJK", "HIRAGANA", "ARABIC", "DEVANAGARI", "CYRILLIC"}


# The checker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose layers each change the stream a lot, as a trained model's do."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, dtype="bfloat16",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> Callable[[Any], list[Any]]:
    return check.transformers_reference(model, LAYERS)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    import torch

    torch.manual_seed(1)
    texts = [torch.randint(0, 256, (length,)) for length in (30, 1, 7)]
    texts.append(torch.full((9,), 7))  # its rows are all alike
    return [{"input_ids": ids, "loss_mask": torch.randint_like(ids, 2)} for ids in texts]


@pytest.fixture
def states(
    tmp_path: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> Path:
    """A directory of files that are right."""
    import torch

    for index, sample in enumerate(samples):
        data = {**sample, "hidden_states": [h.clone() for h in reference(sample["input_ids"])]}
        torch.save(data, tmp_path / f"data_{index}.pt")
    config = {"hidden_states": {"layer_ids": LAYERS}}
    (tmp_path / "data_config.json").write_text(json.dumps(config))
    return tmp_path


def test_reference_is_the_stream_after_the_layer(
    model: Path, reference: Callable[[Any], list[Any]], samples: list[dict[str, Any]]
) -> None:
    """As in transformers' own list, which counts one further and has the last one normed."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = samples[0]["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
    with torch.inference_mode():
        listed = network(ids[None], output_hidden_states=True).hidden_states
    after_0, after_2, after_3 = reference(ids)
    assert torch.equal(after_0, listed[1][0])
    assert torch.equal(after_2, listed[3][0])
    assert torch.equal(network.model.norm(after_3), listed[4][0])
    assert not torch.equal(after_3, listed[4][0])


def test_right_files_pass(
    states: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> None:
    counted: list[int] = []
    outcome = check.check_directory(states, samples, LAYERS, reference, counted.append)
    assert outcome.wrong == []
    assert (outcome.samples, outcome.tokens) == (4, 47)
    assert counted == [30, 1, 7, 9]
    assert [layer.layer_id for layer in outcome.layers] == LAYERS
    assert all(layer.row_error == 0 for layer in outcome.layers)


def test_noise_of_bfloat16_passes(
    states: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> None:
    import torch

    torch.manual_seed(2)

    def blur(data: dict[str, Any]) -> None:
        for layer in data["hidden_states"]:
            layer.mul_(1 + 0.03 * torch.randn_like(layer))

    change(states, blur, "data_0.pt")
    change(states, blur, "data_3.pt")
    outcome = check.check_directory(states, samples, LAYERS, reference)
    assert outcome.wrong == []
    assert 0.01 < outcome.layers[1].sample_error < outcome.layers[1].row_error < 0.1
    assert re.fullmatch(r"data_[03]\.pt\[\d+\]", outcome.layers[1].row)


def change(
    states: Path, edit: Callable[[dict[str, Any]], object], file: str = "data_0.pt"
) -> None:
    import torch

    data = torch.load(states / file)
    edit(data)
    torch.save(data, states / file)


def shift(data: dict[str, Any]) -> None:
    data["hidden_states"][1] = data["hidden_states"][1].roll(1, 0)


def swap(data: dict[str, Any]) -> None:
    data["hidden_states"][2][[4, 9]] = data["hidden_states"][2][[9, 4]]


def not_a_number(data: dict[str, Any]) -> None:
    data["hidden_states"][0][17, 3] = float("nan")


def infinite(data: dict[str, Any]) -> None:
    data["hidden_states"][0][17, 3] = float("inf")


def zero_row(data: dict[str, Any]) -> None:
    data["hidden_states"][2][29] = 0


def neighbouring_layer(data: dict[str, Any]) -> None:
    data["hidden_states"][1] = data["hidden_states"][2]


def systematic(data: dict[str, Any]) -> None:
    data["hidden_states"][1] *= 1.125  # each row within its limit, all of them off


def other_type(data: dict[str, Any]) -> None:
    data["hidden_states"][0] = data["hidden_states"][0].float()


def short_layer(data: dict[str, Any]) -> None:
    data["hidden_states"][0] = data["hidden_states"][0][:-1]


def missing_layer(data: dict[str, Any]) -> None:
    del data["hidden_states"][0]


def other_mask(data: dict[str, Any]) -> None:
    data["loss_mask"][5] ^= 1


def other_id(data: dict[str, Any]) -> None:
    data["input_ids"][5] ^= 1


def two_short(data: dict[str, Any]) -> None:
    data["input_ids"] = data["input_ids"][:-2]


def no_mask(data: dict[str, Any]) -> None:
    del data["loss_mask"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (shift, r"data_0.pt, layer 2, position 8: .*it is the row of position 7"),
        (swap, r"data_0.pt, layer 3, position 9: .*it is the row of position 4"),
        (not_a_number, r"data_0.pt, layer 0, position 17: nan % off"),
        (infinite, r"data_0.pt, layer 0, position 17: inf % off"),
        (zero_row, r"data_0.pt, layer 3, position 29: 100.0 % off"),
        (neighbouring_layer, r"data_0.pt, layer 2: rows are \d+\.\d % off on average"),
        (systematic, r"data_0.pt, layer 2: rows are 12\.\d % off on average"),
        (
            other_type,
            r"data_0.pt, layer 0: torch.float32 \[30, 64\] in place of torch.bfloat16",
        ),
        (
            short_layer,
            r"data_0.pt, layer 0: torch.bfloat16 \[29, 64\] in place of .*\[30, 64\]",
        ),
        (missing_layer, r"data_0.pt has 2 layers, not 3"),
        (other_mask, r"data_0.pt holds another loss mask"),
        (other_id, r"data_0.pt holds the ids of another sample"),
        (two_short, r"data_0.pt has 28 ids of 30"),
        (no_mask, r"data_0.pt doesn't hold input_ids, hidden_states and loss_mask"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_content_is_found(
    states: Path,
    samples: list[dict[str, Any]],
    reference: Callable[[Any], list[Any]],
    edit: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    change(states, edit)
    wrong = check.check_directory(states, samples, LAYERS, reference).wrong
    assert any(re.match(message, sentence) for sentence in wrong), wrong
    assert all("data_0.pt" in sentence for sentence in wrong), wrong


def test_similar_row_in_the_wrong_place_is_found(
    states: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> None:
    """Two rows only 5 % apart, swapped: under both limits of size, told by the neighbour."""
    import torch

    torch.manual_seed(3)

    def with_twins(ids: Any) -> list[Any]:
        rows = [layer.clone() for layer in reference(ids)]
        if len(ids) == 30:
            rows[0][20] = rows[0][10] * (1 + 0.05 * torch.randn_like(rows[0][10]))
        return rows

    ids = samples[0]["input_ids"]
    change(states, lambda data: data.update(hidden_states=with_twins(ids)))
    torch.manual_seed(3)
    right = [layer.clone() for layer in torch.load(states / "data_0.pt")["hidden_states"]]

    def known(ids: Any) -> list[Any]:
        return right if len(ids) == 30 else reference(ids)

    assert check.check_directory(states, samples, LAYERS, known).wrong == []
    change(states, lambda data: data["hidden_states"][0].__setitem__(
        [10, 20], data["hidden_states"][0][[20, 10]]))  # fmt: skip
    outcome = check.check_directory(states, samples, LAYERS, known)
    assert outcome.layers[0].row_error < 0.1
    assert [re.sub(r" [\d.a-z]+ times", " N times", text) for text in outcome.wrong] == [
        "data_0.pt, layer 0, position 10: it is the row of position 20, N times nearer",
        "data_0.pt, layer 0, position 20: it is the row of position 10, N times nearer",
    ]


def test_wrong_directory_is_found(
    states: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> None:
    def wrong() -> list[str]:
        return check.check_directory(states, samples, LAYERS, reference).wrong  # type: ignore[no-any-return]

    content = (states / "data_0.pt").read_bytes()
    (states / "data_0.pt").write_bytes(content[: len(content) // 2])  # cut by a crash
    (states / "data_2.pt").rename(states / "data_4.pt")
    (states / "data_config.json").write_text('{"hidden_states": {"layer_ids": [0, 2]}}')
    found = [re.sub(r"(can't be read: )\w+", r"\1...", sentence) for sentence in wrong()]
    assert found == [
        "data_config.json names layers [0, 2], not [0, 2, 3]",
        "data_4.pt belongs to no sample",
        "data_0.pt can't be read: ...",
        "data_2.pt is missing",
    ]
    (states / "data_config.json").unlink()
    assert wrong()[0] == "data_config.json is missing or can't be read"


def test_full_length_sample_may_lack_its_last_token(
    states: Path, samples: list[dict[str, Any]], reference: Callable[[Any], list[Any]]
) -> None:
    """vLLM has to have room for the token that it generates."""
    shorter = {name: value[:-1] for name, value in samples[0].items()}
    states_of_it = [h.clone() for h in reference(shorter["input_ids"])]
    change(states, lambda data: data.update(shorter, hidden_states=states_of_it))
    assert check.check_directory(states, samples, LAYERS, reference).wrong == []


def test_table_is_printed(
    states: Path,
    samples: list[dict[str, Any]],
    reference: Callable[[Any], list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(states, shift)
    outcome = check.check_directory(states, samples, LAYERS, reference)
    check.print_outcome(outcome, shown=2)
    printed = capsys.readouterr().out
    assert printed.count("wrong: data_0.pt, layer 2, position") == 2
    assert f"... and {len(outcome.wrong) - 2} more" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("│")] == [
        "0", "2", "3",
    ]  # fmt: skip


# The whole


@pytest.mark.engine
def test_demo_from_checkpoint_to_verdict(tmp_path: Path) -> None:
    """A few samples through speculators and vLLM; then a row is moved, and it is seen."""
    pytest.importorskip("vllm")
    pytest.importorskip("speculators")
    torch = pytest.importorskip("torch")
    command = [sys.executable, str(DEMO / "run.py"), "--output", str(tmp_path)]
    command += ["--samples", "5", "--batch-size", "3", "--layers", "29", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every row of all 5 files is right." in done.stdout
    assert re.search(r"5 samples, \d+ tokens, 2 layers: \d+ tokens/s", done.stdout)

    states = tmp_path / "states"
    assert sorted(file.name for file in states.iterdir()) == [
        "data_0.pt", "data_1.pt", "data_2.pt", "data_3.pt", "data_4.pt", "data_config.json",
    ]  # fmt: skip
    config = json.loads((states / "data_config.json").read_text())
    assert config["hidden_states"]["layer_ids"] == [29, 2]
    assert config["data"]["num_samples"] == 5
    assert config["model"]["hidden_size"] == 576

    files = [torch.load(states / f"data_{index}.pt") for index in range(5)]
    for data in files:
        length = len(data["input_ids"])
        assert [tuple(h.shape) for h in data["hidden_states"]] == [(length, 576)] * 2
        assert 0 < int(data["loss_mask"].sum()) < length

    # The same verdict over files of which one is no longer right.
    change(states, swap_last_rows, "data_3.pt")
    reference = check.transformers_reference(tmp_path / "SmolLM2-135M-Instruct", [29, 2])
    outcome = check.check_directory(states, files, [29, 2], reference)
    assert {sentence.split(",")[0] for sentence in outcome.wrong} == {"data_3.pt"}


def swap_last_rows(data: dict[str, Any]) -> None:
    data["hidden_states"][0][[-1, -2]] = data["hidden_states"][0][[-2, -1]]
