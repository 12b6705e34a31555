"""Each release of vLLM x each of speculators: the records say of it what its files say.

From the record (`upstream.json`) always; from the files themselves where they are given:

    VLLM_COMPAT_SOURCES=FOLDER pytest tests/drift     # FOLDER as in recording.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_compat import drift
from vllm_compat.decision import plan
from vllm_compat.environment import detect
from vllm_compat.inspection import registry
from vllm_compat.settings import Settings
from vllm_compat.symbols import Sources

from .recording import Replay, read

KNOWN = read()
PAIRS = [(v, s) for v in KNOWN["vllm"] for s in KNOWN["speculators"]]
FOLDER = os.environ.get("VLLM_COMPAT_SOURCES")
ALLOW = Settings(untested="allow")


def recorded(vllm: str, speculators: str, folder: Path, transformers: str = "4.57.6") -> Replay:
    """Sources of that set: the record, and folders that have a version and no more."""
    roots = {}
    for name, version in (
        ("vllm", vllm),
        ("speculators", speculators),
        ("transformers", transformers),
    ):
        root = folder / f"{name}-{version}" / name
        if not root.exists():
            (root / "v1").mkdir(parents=True)
            (root / "__init__.py").touch()
            (root / "_version.py").write_text(f"__version__ = version = '{version}'\n")
            if name == "speculators":
                generator = root / "data_generation" / "vllm_hidden_states_generator.py"
                generator.parent.mkdir()
                for file in (generator, generator.parent / "__init__.py"):
                    file.touch()
        roots[name] = root
    answers = {
        "vllm": KNOWN["vllm"][vllm],
        "speculators": KNOWN["speculators"][speculators],
        "transformers": KNOWN["transformers"][transformers],
    }
    return Replay(answers, roots)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("releases")


@pytest.mark.parametrize(("vllm", "speculators"), PAIRS, ids=lambda v: str(v))
def test_nothing_has_moved(vllm: str, speculators: str, folder: Path) -> None:
    """Every symbol is there; every probe says what the version range says."""
    sources = recorded(vllm, speculators, folder)
    environment = detect(sources)
    assert environment.vllm is not None
    assert environment.vllm.text == vllm
    assert [str(finding) for finding in drift.check(sources)] == []


@pytest.mark.parametrize(("vllm", "speculators"), PAIRS, ids=lambda v: str(v))
def test_apply_would_take_it(vllm: str, speculators: str, folder: Path) -> None:
    report = plan(recorded(vllm, speculators, folder), ALLOW)
    assert report.active or any(entry.state == "off" for entry in report.entries)
    assert not [note for note in report.notes if "version number" in note]


@pytest.mark.parametrize("transformers", KNOWN["transformers"])
def test_transformers(transformers: str, folder: Path) -> None:
    sources = recorded("0.22.1", "0.3.0", folder, transformers)
    assert [str(finding) for finding in drift.check(sources)] == []
    states = {e.patch.name: e.state for e in plan(sources, ALLOW).entries}
    version = Version(transformers)
    assert (states["transformers-torch-name"] == "off") == (version >= Version("5.4"))
    assert (states["transformers-attn-mask"] == "off") == (version >= Version("5.24"))


def test_the_oldest_and_the_newest_are_on_record() -> None:
    releases = sorted(map(Version, KNOWN["vllm"]))
    assert releases[0].release[:2] == (0, 11)
    minors = {r.release[:2] for r in releases}
    newest = releases[-1].release[1]
    assert minors == {(0, minor) for minor in range(11, newest + 1)}
    assert set(KNOWN["speculators"]) == {"0.3.0", "0.4.0", "0.4.0.1"}


def test_every_versioned_patch_is_on_somewhere_and_off_somewhere(folder: Path) -> None:
    """A range that no release falls in, or that all do, is a mistake in the record."""
    on: dict[str, set[bool]] = {patch.name: set() for patch in registry()}
    for vllm, speculators in PAIRS:
        for entry in plan(recorded(vllm, speculators, folder), ALLOW).entries:
            on[entry.patch.name].add(entry.state != "not needed")
    for patch in registry():
        if patch.transformers:
            continue  # of transformers there is only the one that is installed
        versioned = bool(patch.vllm or patch.speculators)
        assert on[patch.name] == ({True, False} if versioned else {True}), patch.name


def test_installed() -> None:
    pytest.importorskip("vllm", reason="no vLLM here: see the recorded releases")
    assert [str(finding) for finding in drift.check(Sources())] == []


if FOLDER:
    GIVEN = sorted(Path(FOLDER).glob("vllm-*/vllm"))
    GENERATORS = sorted(Path(FOLDER).glob("speculators-*/speculators"))

    @pytest.mark.parametrize("generator", GENERATORS, ids=lambda p: p.parent.name)
    @pytest.mark.parametrize("package", GIVEN, ids=lambda p: p.parent.name)
    def test_given_sources(package: Path, generator: Path) -> None:
        findings = drift.check(Sources({"vllm": package, "speculators": generator}))
        assert [str(finding) for finding in findings] == []
