"""A tiny checkpoint with a chat template, and runs of the real command."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = ("rows", "of", "states", "after", "a", "layer", "belong", "to", "tokens", "not", "luck")
SAMPLES = 44
BATCH = 4
LAYERS = (5, 1, 6)
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"


def make_checkpoint(folder: Path, seed: int) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate(letters + special)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=special[2:],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=vocabulary["<|end|>"],
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Run:
    """A run of the command in a process of its own."""

    process: subprocess.Popen[str]
    output: Path

    def wait(self, status: int = 0) -> str:
        """Its output, once it has ended with ``status``."""
        try:
            text, _ = self.process.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            text, _ = self.process.communicate()
            raise AssertionError(f"did not come to its end:\n{text[-5000:]}") from None
        assert self.process.returncode == status, text[-5000:]
        return text

    def wait_for_files(self, count: int) -> None:
        """Until so many samples are there."""
        deadline = time.monotonic() + 300
        while len(files(self.output)) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.process.communicate()[0][-5000:])
            time.sleep(0.005)

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> str:
        """Sends a signal; the output once it has ended."""
        (os.killpg if group else os.kill)(self.process.pid, number)
        return self.process.communicate(timeout=120)[0]


@dataclass(frozen=True)
class Command:
    """``vllm-compat extract`` for the checkpoint and the conversations."""

    checkpoint: Path
    conversations: Path
    work: Path

    def arguments(self, output: Path, *more: Any) -> list[str]:
        given = [str(argument) for argument in more]
        defaults = {
            "--model": self.checkpoint,
            "--data": self.conversations,
            "--batch-size": BATCH,
            "--seq-length": 1024,
            "--token-freq-path": self.work / "token_freq.pt",
            "--hf-cache-dir": self.work / "datasets",
            "--preprocessing-workers": 1,
            "--cpus-per-replica": 1,
        }
        words = ["extract", "--output", str(output), *given]
        for name, value in defaults.items():
            if name not in given:
                words += [name, str(value)]
        if "--layers" not in given:
            words += ["--layers", *map(str, LAYERS)]
        return words

    def start(self, output: Path, *more: Any, **environment: str) -> Run:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_compat", "--debug", *self.arguments(output, *more)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        return Run(process, output)


def files(folder: Path) -> dict[str, str]:
    """The data files that are there, with a hash of each."""
    if not folder.is_dir():
        return {}
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("data_*.pt")
    }
