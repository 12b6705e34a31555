"""From conversations to files: speculators' preprocessing, and the command `extract`.

The generator alone is not what users run. Their script first has speculators read, render and
tokenise conversations, which needs other packages than the generator does (`datasets` and,
through it, `torchvision`). A cell whose pins break that passes every other case here.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from .models import CHAT_TEMPLATE, FAMILIES, WORDS, Reference, check_states, write_checkpoint

pytestmark = pytest.mark.engine

SEQ_LENGTH = 96
LAYERS = (5, 2, 7)
# "<|", "user" and "|>" of CHAT_TEMPLATE are none of the tokenizer's words, nor is "end".
MARK = [WORDS] * 3

Sample = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Chats:
    model: Path
    reference: Reference
    data: Path
    expected: list[Sample]
    """Token ids and loss mask of each conversation, in the file's order."""


def _conversation(seed: int, turns: int) -> list[tuple[str, list[int]]]:
    source = random.Random(seed)
    return [
        (
            ("user", "assistant")[turn % 2],
            [source.randrange(WORDS) for _ in range(source.randint(1, 12))],
        )
        for turn in range(turns)
    ]


def _expected(conversation: list[tuple[str, list[int]]]) -> Sample:
    """By the template, by hand: what the assistant says is trained on, its marks are not."""
    ids: list[int] = []
    mask: list[int] = []
    for role, words in conversation:
        ids += MARK + words + MARK
        mask += [0] * 3 + [int(role == "assistant")] * len(words) + [0] * 3
    return ids[:SEQ_LENGTH], mask[:SEQ_LENGTH]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    folder = tmp_path_factory.mktemp("chats")
    model = write_checkpoint(FAMILIES[0], folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    # More than ten, more than two batches, and some that are cut off at SEQ_LENGTH.
    conversations = [_conversation(seed, 2 + 2 * (seed % 5)) for seed in range(13)]
    data = folder / "chats.jsonl"
    names = {"user": "human", "assistant": "gpt"}
    data.write_text(
        "".join(
            json.dumps(
                {
                    "conversations": [
                        {"from": names[role], "value": " ".join(f"t{word}" for word in words)}
                        for role, words in conversation
                    ]
                }
            )
            + "\n"
            for conversation in conversations
        )
    )
    expected = [_expected(conversation) for conversation in conversations]
    assert any(len(ids) == SEQ_LENGTH for ids, _ in expected)
    return Chats(folder / "model", Reference(model, LAYERS), data, expected)


@pytest.fixture(scope="module")
def prepared(
    chats: Chats, report: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[Sample]:
    """The conversations as speculators' own function prepares them, in its order."""
    from speculators.data_generation.preprocessing import load_and_preprocess_dataset

    folder = tmp_path_factory.mktemp("prepared")
    dataset, _ = load_and_preprocess_dataset(
        target_model_path=str(chats.model),
        train_data_path=str(chats.data),
        seq_length=SEQ_LENGTH,
        build_dataset_num_proc=1,
        seed=0,
        token_freq_path=str(folder / "token_freq.pt"),
        cache_dir=str(folder / "cache"),
    )
    return [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in dataset]


def test_preprocessing(chats: Chats, prepared: list[Sample]) -> None:
    assert sorted(prepared) == sorted(chats.expected)


def test_extract(chats: Chats, prepared: list[Sample], tmp_path: Path) -> None:
    """The whole command: a file for each conversation, each row its own token's."""
    output = tmp_path / "states"
    done = subprocess.run(
        [
            Path(sys.executable).with_name("vllm-compat"), "extract",
            "--model", chats.model, "--data", chats.data, "--output", output,
            "--token-freq-path", tmp_path / "token_freq.pt",
            "--hf-cache-dir", tmp_path / "cache",
            "--layers", *map(str, LAYERS), "--seq-length", str(SEQ_LENGTH),
            "--batch-size", "4", "--gpu-memory-utilization", "0.1",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert (tmp_path / "token_freq.pt").exists()
    files = sorted(output.glob("*.pt"), key=lambda file: int(file.stem.removeprefix("data_")))
    assert [file.name for file in files] == [f"data_{i}.pt" for i in range(len(prepared))]
    for file, (all_ids, all_mask) in zip(files, prepared, strict=True):
        # The generator leaves room for one token, as in speculators' own script.
        ids, mask = all_ids[: SEQ_LENGTH - 1], all_mask[: SEQ_LENGTH - 1]
        sample = torch.load(file, weights_only=True)
        assert sample["input_ids"].tolist() == ids, file.name
        assert sample["loss_mask"].tolist() == mask, file.name
        check_states(sample["hidden_states"], chats.reference(ids), LAYERS, file.name)
