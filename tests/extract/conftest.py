"""What all of these tests share."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from cores import all_cores

from .support import SAMPLES, WORDS, Command, files, make_checkpoint

LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray listens on 127.0.0.1 only


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of seven layers, large enough that a batch takes a tenth of a second."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package", autouse=True)
def _surroundings() -> Iterator[None]:
    with mock.patch.dict(
        os.environ,
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            LOOPBACK: "0",
        },
    ):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # vLLM would be compiled at each start
        yield


@pytest.fixture(scope="module")
def shared_cores() -> Iterator[None]:
    """Replicas share out what there is."""
    with all_cores():
        yield


@pytest.fixture(scope="package")
def command(
    checkpoint: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> Command:
    return Command(checkpoint, conversations, tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="package")
def undisturbed(command: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one generator writes that nobody stops."""
    output = tmp_path_factory.mktemp("undisturbed") / "states"
    assert command.call(output).written == SAMPLES
    return output


@pytest.fixture(scope="package")
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
