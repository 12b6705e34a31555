"""A tiny checkpoint with a chat template, and runs of the real command."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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

    process: subprocess.Popen[bytes]
    output: Path
    log: IO[bytes]  # not a pipe: what outlives the process must not keep the test waiting

    @property
    def text(self) -> str:
        """What it has said so far."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def wait(self, status: int = 0) -> str:
        """Its output, once it has ended with ``status``."""
        try:
            self.process.wait(timeout=400)
        except subprocess.TimeoutExpired:
            self.kill(group=True)
            raise AssertionError(f"did not come to its end:\n{self.text[-5000:]}") from None
        assert self.process.returncode == status, self.text[-5000:]
        return self.text

    def wait_for_files(self, count: int) -> None:
        """Until so many samples are there."""
        deadline = time.monotonic() + 300
        while len(names(self.output)) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill(group=True)
                raise AssertionError(self.text[-5000:])
            time.sleep(0.005)

    def kill(self, number: int = signal.SIGKILL, group: bool = False) -> str:
        """Sends a signal; the output once it has ended."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.process.pid, number)
        self.process.wait(timeout=120)
        return self.text


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

    def call(self, output: Path, **more: Any) -> Any:
        """The same run, by the function and in this process."""
        from vllm_compat.extract import extract

        given: dict[str, Any] = {
            "layer_ids": LAYERS,
            "seq_length": 1024,
            "batch_size": BATCH,
            "cpus_per_replica": 1,
            "token_freq_path": self.work / "token_freq.pt",
            "cache_dir": str(self.work / "datasets"),
            "preprocessing_workers": 1,
        }
        return extract(str(self.checkpoint), str(self.conversations), output, **given | more)

    def start(self, output: Path, *more: Any, **environment: str) -> Run:
        log = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_compat", "--debug", *self.arguments(output, *more)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            # A script in whose background these tests run would have it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        return Run(process, output, log)


def names(folder: Path) -> list[str]:
    """The data files that are there."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(n for n in os.listdir(folder) if n.endswith(".pt") and n[:5] == "data_")
    return []


def files(folder: Path) -> dict[str, str]:
    """The data files that are there, with a hash of each."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names(folder)
    }


def descendants(root: int) -> set[int]:
    """A process and what came from it, by id."""
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text()
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = {root}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def alive(pid: int) -> bool:
    """Whether a process is there; a zombie isn't."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def titled(pids: set[int], title: str) -> set[int]:
    """Those of the processes whose title begins so."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title.encode()):
                found.add(pid)
    return found


def wait_until_gone(pids: set[int]) -> None:
    """Until the processes have ended."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {sorted(filter(alive, pids))}"
        time.sleep(0.1)


def shared_files(pids: set[int]) -> set[Path]:
    """Shared memory with a name, and sockets with one, that processes have."""
    sockets = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[7].startswith("/"):
            sockets[fields[6]] = Path(fields[7])
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]
                if name and not name.endswith("(deleted)"):
                    found.add(Path("/dev/shm", name))
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
                if inode in sockets:
                    found.add(sockets[inode])
    return found
