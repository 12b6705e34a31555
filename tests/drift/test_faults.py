"""What the drift check says, and what apply() does, when something has moved.

On the record of a release with one answer changed; and on a copy of the installed vLLM in which
a name was changed.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_compat import UnsupportedEnvironmentError, drift
from vllm_compat.decision import plan
from vllm_compat.environment import GENERATOR
from vllm_compat.symbols import Sources

from .recording import Replay
from .test_releases import ALLOW, KNOWN, recorded

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"


def changed(folder: Path, vllm: str, speculators: str, package: str, **answers: Any) -> Replay:
    """That pair, with some answers replaced."""
    sources = recorded(vllm, speculators, folder)
    known = copy.deepcopy(sources._answers)
    for question in answers:
        assert question in known[package], "the question is never asked"
    known[package].update(answers)
    return Replay(known, dict(sources._roots))  # type: ignore[arg-type]


def test_a_symbol_that_is_gone(tmp_path: Path) -> None:
    gone = f"find {SCHEDULER}.finish_requests"
    sources = changed(tmp_path, "0.32.0", "0.3.0", "vllm", **{gone: None})
    (finding,) = drift.check(sources)
    assert finding.kind == "gone"
    assert finding.patch == "scheduler"
    assert finding.symbol == f"{SCHEDULER}.finish_requests"
    assert finding.seen
    with pytest.raises(
        UnsupportedEnvironmentError, match=r"Scheduler\.finish_requests"
    ) as caught:
        plan(sources, ALLOW)
    assert "Nothing was changed" in str(caught.value)


def test_a_parameter_that_is_gone(tmp_path: Path) -> None:
    question = f"find {SCHEDULER}.finish_requests"
    answer = copy.deepcopy(KNOWN["vllm"]["0.16.0"][question])
    answer["parameters"] = [p for p in answer["parameters"] if p != "finished_status"]
    sources = changed(tmp_path, "0.16.0", "0.3.0", "vllm", **{question: answer})
    (finding,) = drift.check(sources)
    assert (finding.kind, finding.patch) == ("parameters", "scheduler")
    assert "finished_status" in finding.what
    with pytest.raises(UnsupportedEnvironmentError, match="finished_status"):
        plan(sources, ALLOW)


def test_a_change_that_came_earlier_than_the_record_says(tmp_path: Path) -> None:
    """0.16.0 whose Request has lost eos_token_id already: the probe decides, and it is said."""
    question = "find vllm.v1.request:Request"
    answer = copy.deepcopy(KNOWN["vllm"]["0.16.0"][question])
    answer["parameters"] = [p for p in answer["parameters"] if p != "eos_token_id"]
    sources = changed(tmp_path, "0.16.0", "0.3.0", "vllm", **{question: answer})
    (finding,) = drift.check(sources)
    assert (finding.kind, finding.patch) == ("range", "request-eos-token-id")
    report = plan(sources, ALLOW)
    assert report["request-eos-token-id"].state == "off"  # it will be put on
    assert any("request-eos-token-id" in note for note in report.notes)


def test_a_name_that_the_generator_binds_no_more(tmp_path: Path) -> None:
    question = f"names {GENERATOR}"
    names = [n for n in KNOWN["speculators"]["0.3.0"][question] if n != "MultiprocExecutor"]
    sources = changed(tmp_path, "0.16.0", "0.3.0", "speculators", **{question: names})
    findings = drift.check(sources)
    assert {f.kind for f in findings} == {"seam"}
    assert "row-attribution" in {f.patch for f in findings}


def test_an_import_of_the_generator_that_vllm_has_no_more(tmp_path: Path) -> None:
    gone = "find vllm.v1.structured_output:StructuredOutputManager"
    module = "find vllm.v1.structured_output.StructuredOutputManager"
    sources = recorded("0.32.0", "0.3.0", tmp_path)
    known = copy.deepcopy(sources._answers)
    known["vllm"].update({gone: None, module: None})
    sources = Replay(known, dict(sources._roots))  # type: ignore[arg-type]
    (finding,) = drift.check(sources)
    assert finding.kind == "import"
    with pytest.raises(UnsupportedEnvironmentError, match="StructuredOutputManager"):
        plan(sources, ALLOW)


def test_a_speculators_without_the_generator(tmp_path: Path) -> None:
    root = tmp_path / "speculators"
    root.mkdir()
    (root / "__init__.py").touch()
    sources = recorded("0.16.0", "0.3.0", tmp_path)
    replay = Replay(sources._answers, {**sources._roots, "speculators": root})  # type: ignore[dict-item]
    (finding,) = drift.check(replay)
    assert finding.kind == "environment"
    assert "VllmHiddenStatesGenerator" in finding.what


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the installed vLLM, to be changed."""
    root = Sources().root("vllm")
    if root is None:
        pytest.skip("no vLLM here; the recorded releases are checked without one")
    target = tmp_path_factory.mktemp("copy") / "vllm"
    keep = {"py"}

    def others(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if "." in n and n.rsplit(".", 1)[1] not in keep]

    shutil.copytree(root, target, ignore=others)
    return target


def test_the_command_names_symbol_patch_and_consequence(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drift.main(["--path", str(copied.parent)]) == 0
    assert "nothing has moved" in capsys.readouterr().out
    file = copied / "v1" / "core" / "kv_cache_utils.py"
    before = file.read_text()
    file.write_text(before.replace("def get_kv_cache_configs(", "def plan_kv_cache("))
    try:
        assert drift.main(["--path", str(copied)]) == 1
        out = capsys.readouterr().out
        assert "vllm.v1.core.kv_cache_utils:get_kv_cache_configs" in out
        assert "kv-cache-config" in out
        assert "the KV cache can't be planned" in out
        assert drift.main(["--path", str(copied), "--json"]) == 1
        (tree,) = json.loads(capsys.readouterr().out)
        assert tree["findings"][0]["patch"] == "kv-cache-config"
    finally:
        file.write_text(before)


def test_the_command_without_a_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["--path", str(tmp_path)]) == 2
    assert "no vLLM under" in capsys.readouterr().err
