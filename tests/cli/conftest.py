"""A tiny model with a chat template, and the command line as its users start it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """On a busy machine torch's threads wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8 layers with random weights; its words are t0, t1, ..."""
    from conformance.models import write_chat_checkpoint

    return write_chat_checkpoint(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 conversations of different lengths in ShareGPT form."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with path.open("w") as file:
        for index in range(14):
            turns = []
            for turn in range(2 + 2 * (index % 3)):
                first = 31 * index + 7 * turn
                words = [f"t{word % 500}" for word in range(first, first + 5 + index)]
                turns.append({"from": ("human", "gpt")[turn % 2], "value": " ".join(words)})
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


_REMOTE = """
from transformers import PretrainedConfig


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **more):
        super().__init__(**more)
        self.vision_config, self.llm_config = vision_config, llm_config
"""


def in_other_words(model: Path, folder: Path, kind: str) -> Path:
    """The config and tokenizer of the tiny model in the words of ChatGLM or InternVL."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    usual = json.loads((model / "config.json").read_text())
    if kind == "chatglm":
        config = {
            "model_type": "chatglm",
            "architectures": ["ChatGLMModel"],
            "num_layers": usual["num_hidden_layers"],
            "hidden_size": usual["hidden_size"],
            "num_attention_heads": usual["num_attention_heads"],
            "padded_vocab_size": usual["vocab_size"],
            "seq_length": usual["max_position_embeddings"],
        }
    else:
        config = {
            "model_type": "internvl_chat",
            "architectures": ["InternVLChatModel"],
            "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
            "vision_config": {"num_hidden_layers": 3, "hidden_size": 32},
            "llm_config": usual,
        }
        (folder / "configuration_internvl_chat.py").write_text(_REMOTE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def environment(**extra: str) -> dict[str, str]:
    """Variables for a process of a test."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "COLUMNS")
    env = {n: v for n, v in os.environ.items() if n not in dropped}
    # Also where this package is not installed but found by a path.
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p.endswith("site-packages"))
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env | extra


def command(
    words: Sequence[str | Path], cwd: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(**options.pop("env", {})),
        capture_output=True,
        text=True,
        timeout=options.pop("timeout", 300),
        check=False,
        **options,
    )
