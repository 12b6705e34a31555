"""``estimate``: held against real files, and against speculators' own preprocessing."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_compat.cli import CommandError, main
from vllm_compat.cli.estimate import Model, estimate, ring_bytes

from .conftest import in_other_words


def test_bytes_are_those_of_real_files(tmp_path: Path) -> None:
    lengths = [5, 17, 200, 64, 31, 90]
    for index, n in enumerate(lengths):
        data = {
            "input_ids": torch.arange(n),
            "hidden_states": [torch.zeros(n, 96, dtype=torch.bfloat16) for _ in range(4)],
            "loss_mask": torch.ones(n, dtype=torch.long),
        }
        torch.save(data, tmp_path / f"data_{index}.pt")
    block = 4096
    real = sum(-(-f.stat().st_size // block) * block for f in tmp_path.glob("*.pt"))
    found = estimate(Model(4, 96, 2), 6, lengths, max_len=2048, batch_size=4)
    assert (found.samples, found.tokens, found.uncertainty) == (6, sum(lengths), 0)
    assert found.per_token == 4 * 96 * 2 + 16
    assert found.disk == pytest.approx(real, rel=0.02)
    assert found.batch == pytest.approx(4 * sum(lengths) / 6 * 4 * 96 * 2, abs=1)
    assert found.batch_most == 4 * 2047 * 4 * 96 * 2


def test_long_texts_are_cut_as_the_generator_does() -> None:
    found = estimate(Model(1, 8, 2), 2, [100, 10], max_len=100, batch_size=8)
    assert (found.tokens, found.longest) == (99 + 10, 99)


def test_a_part_is_extrapolated_with_its_uncertainty() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 1000, (20_000,), generator=generator).tolist()
    lengths[::10] = [0] * 2000  # dropped by the preprocessing
    found = estimate(Model(1, 8, 2), 20_000, lengths[:1001], max_len=2048, batch_size=8)
    assert abs(found.tokens - sum(lengths)) < found.uncertainty < 0.05 * sum(lengths)
    assert found.samples == pytest.approx(18_000, rel=0.01)


def test_data_without_a_sample_is_refused() -> None:
    with pytest.raises(CommandError, match="leaves no sample"):
        estimate(Model(1, 8, 2), 3, [0, 0, 0], max_len=100, batch_size=8)


@pytest.mark.parametrize(
    ("tokens", "layers", "hidden"), [(8192, 4, 4096), (64, 1, 64), (8192, 1, 576)]
)
def test_the_ring_is_the_engine_s(tokens: int, layers: int, hidden: int) -> None:
    from vllm_compat.engine import Engine

    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens)
        ),
        description={"hidden_size": hidden},
    )
    assert ring_bytes(tokens, layers, hidden) == Engine._ring_size(engine, layers)  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path) -> list[str]:
    return ["--hf-cache-dir", str(tmp_path / "cache"), "--output", str(tmp_path / "states")]


def test_tokens_are_those_of_the_preprocessing(
    model: Path,
    conversations: Path,
    cache: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    dataset, _ = load_and_preprocess_dataset(
        target_model_path=str(model),
        train_data_path=str(conversations),
        seq_length=50,
        build_dataset_num_proc=1,
        max_samples=9,
        token_freq_path=str(tmp_path / "freq.pt"),
        cache_dir=str(tmp_path / "cache"),
    )
    capsys.readouterr()
    words = ["estimate", "--model", str(model), "--data", str(conversations), "--max-len", "50"]
    assert main([*words, *cache, "--max-samples", "9", "--layers", "1", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lengths = [min(len(ids), 49) for ids in dataset["input_ids"]]
    assert found["tokens"] == sum(lengths)
    assert (found["samples"], found["longest"]) == (9, max(lengths))
    assert found["per_token"] == 2 * 256 * 2 + 16
    assert found["layer_ids"] == [1, 2]
    assert found["fits"] is True

    assert main([*words, *cache]) == 0
    out = capsys.readouterr().out
    assert "14 files" in out
    assert "layers 2, 4, 5, 7 x 256 x 2 bytes" in out
    assert "It fits: " in out

    usage = namedtuple("usage", "total used free")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 10**6))
        assert main([*words, *cache]) == 1
    assert "DOESN'T FIT: " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["chatglm", "internvl"])
def test_configs_in_other_words(
    model: Path,
    conversations: Path,
    cache: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    folder = in_other_words(model, tmp_path / kind, kind)
    words = ["estimate", "--model", str(folder), "--data", str(conversations), "--json"]
    assert main([*words, *cache]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["layer_ids"] == [2, 4, 5, 7]
    assert found["per_token"] == 4 * 256 * 2 + 16


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--data", "nothing.jsonl", "there is no file nothing.jsonl."),
        ("--data", "no-such-set", "Unsupported dataset: no-such-set"),
        ("--layers", "8", "layer 8 is outside of [0, 7]: the model has 8 layers."),
        ("--model", "/no/model", "There is no folder /no/model"),
    ],
)
def test_errors_are_sentences(
    model: Path,
    conversations: Path,
    cache: list[str],
    capsys: pytest.CaptureFixture[str],
    option: str,
    value: str,
    sentence: str,
) -> None:
    words = {"--model": str(model), "--data": str(conversations), option: value}
    assert main(["estimate", *(w for pair in words.items() for w in pair), *cache]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("vllm-compat estimate: ")
    assert sentence in last
