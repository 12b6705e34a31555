"""vLLM's own tests of its V1 core, without and with our patches on; compares the two.

    python tests/guest/upstream.py SOURCES [FOLDER]

SOURCES is the unpacked source release of the installed vLLM (docs/guest.md says how to get
it). FOLDER is where the run takes place; by default a temporary one. Both runs are offline.
Models that the tests name are looked for in the working folder first, so stand-ins lie there
under the same names: configuration and tokenizer, no weights.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent.parent))

from guest.processes import environment

SELECTED = ("tests/v1/core", "tests/v1/test_request.py", "tests/v1/structured_output")


def pytest_configure(config: Any) -> None:
    """As a plugin (``-p guest.upstream``): has the patches on for the whole run."""
    import vllm_compat

    vllm_compat.apply()
    importlib.import_module("speculators.data_generation.vllm_hidden_states_generator")


def pytest_report_header() -> str:
    """Says in the run's own output that they were."""
    import vllm_compat

    return f"vllm-compat: {len(_on(vllm_compat.status(workers=False)))} patches on"


def pytest_unconfigure(config: Any) -> None:
    """Still on, after everything that the tests did."""
    import vllm_compat

    assert _on(vllm_compat.status(workers=False))


def _on(report: Any) -> list[str]:
    return [entry.patch.name for entry in report.entries if entry.state == "on"]


def write_stand_ins(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, OPTConfig, PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(50_255)} | {"<pad>": 50_255, "</s>": 50_256}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<pad>", eos_token="</s>"
    )
    # The values of the two classes are those of these two models.
    opt = OPTConfig(architectures=["OPTForCausalLM"])
    gpt2 = GPT2Config(architectures=["GPT2LMHeadModel"])
    for name, config in (("facebook/opt-125m", opt), ("gpt2", gpt2)):
        config.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)


def run(folder: Path, applied: bool) -> dict[str, str]:
    """Outcome by test."""
    report = folder / f"{'with' if applied else 'without'}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no"),
        *(["-p", "guest.upstream"] if applied else []),
        *(f"--junit-xml={report}", f"--rootdir={folder}", *SELECTED),
    ]
    env = environment(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    print(" ".join(command), flush=True)
    subprocess.run(command, cwd=folder, env=env, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = "+".join(sorted(outcomes)) or "passed"
    return found


def main(sources: Path, folder: Path) -> int:
    # The tests without the sources beside them: it is the installed vLLM that is tested.
    shutil.copytree(sources / "tests", folder / "tests")
    write_stand_ins(folder)
    without, with_ours = (run(folder, applied) for applied in (False, True))
    for title, outcomes in (("without", without), ("with", with_ours)):
        print(f"{title}: {dict(Counter(outcomes.values()))}, {len(outcomes)} tests")
    different = {
        name: (without.get(name), with_ours.get(name))
        for name in sorted({*without, *with_ours})
        if without.get(name) != with_ours.get(name)
    }
    for name, (before, after) in different.items():
        print(f"{name}: {before} without, {after} with")
    print(f"{len(different)} tests differ")
    return 1 if different or not without else 0


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(Path(sys.argv[1]), Path(temporary)))
