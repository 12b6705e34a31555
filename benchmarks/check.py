"""`vllm-compat check` beside plain reading: the same files, one run, from cache and from disk.

    python benchmarks/check.py FOLDER [--gigabytes 3] [--threads N]

Writes files into FOLDER, as large as those of an 8B model, and removes them again. Subjects
take turns; the figures are medians of three rounds, in MB/s, and their ratio to plain reading
(1 MiB at a time, as many threads). "From disk" drops the files from the page cache first
(posix_fadvise), which needs no root; the disk's own cache stays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from vllm_compat.checks.files import check_directory

TOKENS, HIDDEN, LAYERS = 1500, 4096, 4
PIECE = 1 << 20


def write(folder: Path, nbytes: int) -> list[Path]:
    """One file's content under many names: what counts is that each is read."""
    folder.mkdir(parents=True, exist_ok=True)
    states = [torch.randn(TOKENS, HIDDEN).to(torch.bfloat16) for _ in range(LAYERS)]
    ids = torch.arange(TOKENS)
    sample = {"input_ids": ids, "hidden_states": states, "loss_mask": torch.ones_like(ids)}
    torch.save(sample, folder / "data_0.pt")
    content = (folder / "data_0.pt").read_bytes()
    files = [folder / f"data_{i}.pt" for i in range(max(1, nbytes // len(content)))]
    for file in files:
        with open(file, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())  # pages that aren't written yet can't be dropped
    return files


def drop(files: list[Path]) -> None:
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(file: Path, digest: Callable[[memoryview], object] = lambda piece: None) -> None:
    buffer = memoryview(bytearray(PIECE))
    with open(file, "rb", buffering=0) as opened:
        while n := opened.readinto(buffer):
            digest(buffer[:n])


def in_threads(threads: int, one: Callable[[Path], None], files: list[Path]) -> None:
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, files))


def sound(folder: Path, threads: int, checksums: bool, files: list[Path]) -> None:
    assert check_directory(folder, threads=threads, checksums=checksums).sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=max(2, cores))
    arguments = parser.parse_args()
    folder = arguments.folder / "vllm-compat-check"
    torch.set_num_threads(1)

    def sha(file: Path) -> None:
        read(file, hashlib.sha256().update)

    subjects: dict[str, Callable[[list[Path]], None]] = {
        "plain reading": partial(in_threads, arguments.threads, read),
        "SHA-256": partial(in_threads, arguments.threads, sha),
        "check": partial(sound, folder, arguments.threads, True),
        "check --no-checksums": partial(sound, folder, arguments.threads, False),
    }
    files: list[Path] = []
    try:
        files = write(folder, int(arguments.gigabytes * 1e9))
        total = sum(file.stat().st_size for file in files)
        print(
            f"{len(files)} files, {total / 1e9:.2f} GB, {cores} cores, "
            f"{arguments.threads} threads, torch {torch.__version__}, "
            f"Python {sys.version.split()[0]}"
        )
        for where in ("from the page cache", "from disk"):
            seconds: dict[str, list[float]] = {name: [] for name in subjects}
            in_threads(arguments.threads, read, files)
            for _ in range(3):
                for name, subject in subjects.items():
                    if where == "from disk":
                        drop(files)
                    began = time.monotonic()
                    subject(files)
                    seconds[name].append(time.monotonic() - began)
            plain = statistics.median(seconds["plain reading"])
            print(where)
            for name, taken in seconds.items():
                middle = statistics.median(taken)
                print(
                    f"  {name:<22} {total / middle / 1e6:7.0f} MB/s  {plain / middle:5.2f}  "
                    f"({', '.join(f'{total / s / 1e6:.0f}' for s in sorted(taken))})",
                    flush=True,
                )
    finally:
        for file in files:
            file.unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
