"""What a release is built with: twice the same bytes, and all of it."""

from __future__ import annotations

import email
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None,
    reason="needs git and a checkout of it",
)


@lru_cache
def _commit() -> str:
    """HEAD, once: somebody may commit while this runs."""
    return _git("rev-parse", "HEAD").strip()


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), "-c", "safe.directory=*", *arguments],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def _release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """sdist and wheel, built twice by users of other habits."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        release = _release(patch)
        for umask, zone, name in ((0o077, "Asia/Tokyo", "a"), (0o002, "America/Lima", "b")):
            patch.setenv("TZ", zone)
            before = os.umask(umask)
            try:
                folder = tmp_path_factory.mktemp(name)
                found.append(release.build(Path(sys.executable), _commit(), folder))
            finally:
                os.umask(before)
    first, second = found
    assert [f.name for f in first] == [f.name for f in second]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    sdist, wheel = first
    return sdist, wheel


def _tracked() -> set[str]:
    return set(_git("ls-tree", "-r", "--name-only", _commit()).splitlines())


def test_the_sdist_has_all_that_is_tracked(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
        assert {(m.uid, m.gid, m.uname, m.gname) for m in archive.getmembers()} == {
            (0, 0, "", "")
        }
    assert _tracked() - names == set()
    assert {name for name in names - _tracked() if ".egg-info/" not in name} == {
        "PKG-INFO",
        "setup.cfg",
    }


def test_the_wheel_has_the_package_and_no_more(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = {
        f"vllm_compat/{name}" if name.startswith("patches/") else name
        for name in _tracked()
        if name.startswith(("patches/", "vllm_compat/"))
    }
    assert names == tracked


def test_the_metadata(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
        assert any(n.endswith("/licenses/LICENSE") for n in archive.namelist())
    assert metadata["Name"] == "vllm-compat"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# vllm-compat")
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{metadata['Version']}]" in changelog
    python = {c.rpartition(" ")[2] for c in metadata.get_all("Classifier") if "3.1" in c}
    assert python == {"3.10", "3.11", "3.12"}
