"""Each patch that is on here is needed here: left out, a real vLLM fails for its reason."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import vllm_compat

from .conftest import Run

# What the user would see on vLLM 0.16.0 with speculators 0.3.0, from the last line of the
# traceback. Some are errors of the other patches, which find what they need missing.
WITHOUT = {
    "engine-args": r"is_encoder_decoder",
    "row-attribution": r"_setup_hidden_states_capture|before it has made it",
    "two-phase-step": r"sample_tokens\(\) must be called",
    "reply-rank": r"list index out of range",
    "memory-query": r"CUDA|NVIDIA|cuda",
    "kv-cache-config": r"kv_cache_specs",
    "scheduler": r"block_size",  # the one adapter of Scheduler gives it its block size too
    "scheduler-block-size": r"block_size",
    "request-account": r"isn't in this batch|Sequence|belongs to no",
    "results-by-offset": r"KeyError",
    "generator-door": r"is_encoder_decoder",
}
SCENES_OF_THEIR_OWN = {"block-hasher", "tokenizer-remote-code", "layers-in-other-words"}
NEEDS_A_GPU = {"import-without-cuda"}  # tests/guest shows what a CPU can show of it


def on_here() -> list[str]:
    return [
        entry.patch.name
        for entry in vllm_compat.status(workers=False).entries
        if entry.state in ("on", "off", "waiting")
    ]


pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        "0.16.0" not in str(vllm_compat.status(workers=False).environment.vllm)
        or "0.3.0" not in str(vllm_compat.status(workers=False).environment.speculators),
        reason="the messages are those of vLLM 0.16.0 with speculators 0.3.0",
    ),
]


def test_no_patch_is_left_out() -> None:
    assert set(on_here()) == set(WITHOUT) | SCENES_OF_THEIR_OWN | NEEDS_A_GPU


def test_with_all_of_them_it_runs(one_prompt: Run, checkpoint: Path) -> None:
    done = one_prompt(checkpoint)
    assert "\nOK\n" in done.stdout, done.stderr[-3000:]


def test_in_forked_workers_too(one_prompt: Run, checkpoint: Path) -> None:
    done = one_prompt(checkpoint, "fork")
    assert "\nOK\n" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_without_it_fails(name: str, one_prompt: Run, checkpoint: Path) -> None:
    done = one_prompt(checkpoint, VLLM_COMPAT_SKIP=name)
    assert done.returncode != 0
    assert "\nOK\n" not in done.stdout
    last = done.stderr.rstrip().splitlines()[-40:]
    assert re.search(WITHOUT[name], "\n".join(last)), "\n".join(last)


def test_block_hasher(one_prompt: Run, checkpoint: Path) -> None:
    """Its fault shows where prefix caching is on; engine-args turns it off otherwise."""
    done = one_prompt(checkpoint, "prefix-caching")
    assert "\nOK\n" in done.stdout, done.stderr[-3000:]
    done = one_prompt(checkpoint, "prefix-caching", VLLM_COMPAT_SKIP="block-hasher")
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_tokenizer_remote_code(one_prompt: Run, checkpoint: Path, tmp_path: Path) -> None:
    """A tokenizer with code of its own, as Kimi's."""
    folder = tmp_path / "remote"
    shutil.copytree(checkpoint, folder)
    (folder / "tokenization_here.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Here(PreTrainedTokenizerFast):\n    pass\n"
    )
    config = folder / "tokenizer_config.json"
    text = config.read_text("utf-8")
    text = re.sub(r'"tokenizer_class": "[^"]*"', '"tokenizer_class": "Here"', text)
    text = text.rstrip().removesuffix("}").rstrip()
    text += ',\n "auto_map": {"AutoTokenizer": [null, "tokenization_here.Here"]}\n}\n'
    config.write_text(text, "utf-8")
    done = one_prompt(folder, HF_HOME=str(tmp_path / "hf"))
    assert "\nOK\n" in done.stdout, done.stderr[-3000:]
    done = one_prompt(
        folder, HF_HOME=str(tmp_path / "hf2"), VLLM_COMPAT_SKIP="tokenizer-remote-code"
    )
    assert done.returncode != 0
    assert "trust_remote_code" in done.stderr


def test_layers_in_other_words(one_prompt: Run, tmp_path: Path) -> None:
    """ChatGLM's config says num_layers; tests/families shows that with the patch it runs."""
    from families import checkpoints
    from families.registry import BY_NAME

    model = checkpoints.make(BY_NAME["chatglm"], "bfloat16", tmp_path) / "model"
    done = one_prompt(
        model, HF_HOME=str(tmp_path / "hf"), VLLM_COMPAT_SKIP="layers-in-other-words"
    )
    assert done.returncode != 0
    assert "Cannot determine num_layers from config" in done.stderr
