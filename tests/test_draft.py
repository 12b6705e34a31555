"""The example that trains a draft model: a short form of it, with a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "eagle3_smollm2"
SHORT = ["--seq-length", "128", "--tokens-per-step", "128", "--draft-vocabulary", "64"]

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    from conformance.models import write_chat_checkpoint

    return write_chat_checkpoint(tmp_path_factory.mktemp("draft") / "tiny-llama")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 conversations; words near t0 are more frequent than those near t200."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    with path.open("w") as file:
        for index in range(30):
            words = [f"t{(index * place) % (10 + 7 * index)}" for place in range(20 + index)]
            turns = [
                {"from": "human", "value": f"t{index}"},
                {"from": "gpt", "value": " ".join(words)},
            ]
            file.write(json.dumps({"conversations": turns}) + "\n")
    return path


def _run(output: Path, *words: object) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, EXAMPLE / "run.py", "--output", output, *map(str, words)],
        capture_output=True, text=True, timeout=800, env=env, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(
    model: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    output = tmp_path_factory.mktemp("output")
    words = ["--model", model, "--conversations", conversations, *SHORT, "--epochs", 3]
    return output, _run(output, *words)


def test_a_short_form(done: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    output, run = done
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.endswith("The loss fell, and the checkpoint loads.\n")
    assert "All are sound." in run.stdout

    import numpy as np
    import torch

    t2d, d2t = np.load(output / "t2d.npy"), np.load(output / "d2t.npy")
    assert (t2d.shape, t2d.dtype, d2t.shape) == ((512,), np.bool_, (64,))
    known = (np.arange(64) + d2t).tolist()
    assert known == np.flatnonzero(t2d).tolist()
    counts = torch.load(output / "token_freq.pt", weights_only=True)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))[:64]
    assert sorted(frequent) == known

    checkpoint = output / "draft" / "2"
    assert {"config.json", "model.safetensors"} <= {f.name for f in checkpoint.iterdir()}
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == 64


def test_a_loss_that_does_not_fall_is_no_success(
    done: tuple[Path, subprocess.CompletedProcess[str]], model: Path, conversations: Path
) -> None:
    """Without learning; on the states of the run before, which are not computed again."""
    output, _ = done
    before = (output / "states" / "data_0.pt").stat().st_mtime_ns
    words = ["--model", model, "--conversations", conversations, *SHORT]
    run = _run(output, *words, "--epochs", 1, "--learning-rate", 0)
    assert run.returncode == 1, run.stdout[-3000:] + run.stderr[-3000:]
    assert "NOT RIGHT: the loss didn't fall" in run.stdout
    assert (output / "states" / "data_0.pt").stat().st_mtime_ns == before


@pytest.mark.slow
def test_from_conversations_to_a_checkpoint(tmp_path: Path) -> None:
    """All of it, with SmolLM2: `python3 scripts/demo.py --example eagle3_smollm2`."""
    run = _run(tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
