"""What all of these tests share."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from .support import SAMPLES, WORDS, Command, files, make_checkpoint

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray listens on 127.0.0.1 only


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of seven layers, large enough that a batch takes a tenth of a second."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two turns each, of 40 to 900 tokens."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    source = random.Random(4)
    with path.open("w") as lines:
        for number in range(SAMPLES):
            turns = []
            for _ in range(2):
                for role in ("human", "gpt"):
                    words = source.choices(WORDS, k=source.randrange(1, 40))
                    turns.append({"from": role, "value": f"{number} {' '.join(words)}"})
            lines.write(json.dumps({"conversations": turns}) + "\n")
    return path


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM would be compiled at each start
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(LOOPBACK, "0")


@pytest.fixture(scope="session")
def command(
    checkpoint: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    return Command(checkpoint, conversations, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session")
def undisturbed(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one generator writes that nobody stops."""
    output = tmp_path_factory.mktemp("undisturbed") / "states"
    assert command.call(output).written == SAMPLES
    return output


@pytest.fixture(scope="session")
def same_files(undisturbed: Path) -> Callable[[Path], None]:
    """Asserts that a folder has what the undisturbed run wrote, byte for byte, and no more."""
    expected = files(undisturbed)
    assert len(expected) == SAMPLES

    def check(folder: Path) -> None:
        assert files(folder) == expected
        assert not list(folder.glob("*.part"))
        lengths = json.loads((folder / "sample_lengths.json").read_text())
        assert lengths == json.loads((undisturbed / "sample_lengths.json").read_text())
        counts = json.loads((folder / "manifest.json").read_text())["counts"]
        assert counts == {"samples": SAMPLES, "written": SAMPLES, "missing": 0, "failed": 0}

    return check
