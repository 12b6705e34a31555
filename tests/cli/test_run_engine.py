"""``run`` with a real engine whose workers are spawned, and ``check`` on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_compat.cli import main

from .conftest import command

# What speculators' own script does, shortened, without a word about vllm-compat.
SCRIPT = """
import argparse, json, os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from speculators.data_generation.config_generator import DataGenerationConfig
from speculators.data_generation.preprocessing import load_and_preprocess_dataset
from speculators.data_generation.vllm_hidden_states_generator import (
    VllmHiddenStatesGenerator,
)

# A spawned worker imports this file as its main module: who, where from.
with open(os.environ["IMPORTS"], "a") as log:
    log.write(f"{__name__} {__file__} {sys.argv[1:]}\\n")


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    output = Path(args.output)
    output.mkdir()
    dataset, _ = load_and_preprocess_dataset(
        target_model_path=args.model, train_data_path=args.data, seq_length=512,
        build_dataset_num_proc=1, token_freq_path=str(output / "token_freq.pt"),
        cache_dir=str(output / "cache"),
    )
    generator = VllmHiddenStatesGenerator(model_path=args.model, max_model_len=512)
    with ThreadPoolExecutor(4) as pool:
        for start in range(0, len(dataset), 5):
            batch = dataset[start : start + 5]
            for j, result in enumerate(generator.generate(batch["input_ids"])):
                mask = batch["loss_mask"][j][: len(result["input_ids"])]
                pool.submit(torch.save, {**result, "loss_mask": mask},
                            output / f"data_{start + j}.pt").result()
    config = DataGenerationConfig.from_generator(
        generator=generator, train_data_path=args.data, seq_length=512, cache_dir="",
        num_samples=len(dataset),
    )
    (output / "data_config.json").write_text(json.dumps(config.to_dict()))


if __name__ == "__main__":
    main()
    sys.exit(7)
"""


@pytest.mark.engine
def test_spawned_workers_and_the_files(
    model: Path, conversations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT)
    output = tmp_path / "states"
    words = ["--model", model, "--data", conversations, "--output", output]
    done = command(
        ["-m", "vllm_compat", "run", script, *words],
        env={
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "HF_HUB_OFFLINE": "1",
            "IMPORTS": str(tmp_path / "imports"),
        },
        timeout=600,
    )
    assert done.returncode == 7, done.stderr[-3000:]
    shown = list(map(str, words))
    assert (tmp_path / "imports").read_text().splitlines() == [
        f"__main__ {script} {shown}",
        f"__mp_main__ {script} {shown}",
    ]
    assert main(["check", str(output), "--json"]) == 0, capsys.readouterr().out
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["bad"], found["notes"]) == (14, [], [])
    assert found["layer_ids"] == [2, 4, 5, 7]
