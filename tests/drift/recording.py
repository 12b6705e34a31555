"""What releases of vLLM, speculators and transformers answer to what the patches ask.

`upstream.json` holds the answers, so that all pairs of releases are checked in each run of the
tests, without their wheels. This file writes it:

    python tests/drift/recording.py FOLDER

FOLDER holds unpacked wheels, one folder each, `vllm-0.16.0/vllm/...` and
`speculators-0.3.0/speculators/...`, `transformers-5.19.0/transformers/...`; their `*.py` and
`*.dist-info/METADATA` are enough. A new patch or probe may ask something new. The test says so
then, and this has to be run again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_compat.environment import GENERATOR, detect
from vllm_compat.inspection import registry
from vllm_compat.record import Look
from vllm_compat.symbols import Found, Sources

RECORD = Path(__file__).with_name("upstream.json")

RECORDED = ("speculators", "transformers", "vllm")


def _package(name: str) -> str:
    return name.split(":")[0].split(".")[0]


class Recorder(Sources):
    """Sources that note each answer, by package."""

    def __init__(self, roots: dict[str, Path]) -> None:
        super().__init__(roots)
        self.answers: dict[str, dict[str, Any]] = {name: {} for name in RECORDED}

    def _note(self, package: str, question: str, answer: Any) -> None:
        if package in self.answers:
            self.answers[package][question] = answer

    def find(self, symbol: str) -> Found | None:
        found = super().find(symbol)
        self._note(_package(symbol), f"find {symbol}", None if found is None else asdict(found))
        return found

    def says(self, module: str, text: str) -> bool:
        answer = super().says(module, text)
        self._note(_package(module), f"says {module} {text}", answer)
        return answer

    def names(self, module: str) -> list[str]:
        answer = super().names(module)
        self._note(_package(module), f"names {module}", answer)
        return answer

    def matches(self, module: str, pattern: str) -> bool:
        answer = super().matches(module, pattern)
        self._note(_package(module), f"matches {module} {pattern}", answer)
        return answer

    def imports(self, module: str, package: str) -> list[str]:
        answer = super().imports(module, package)
        self._note(_package(module), f"imports {module} {package}", answer)
        return answer


class Replay(Sources):
    """Sources that answer from the record.

    Args:
        answers: package to question to answer, of one release each.
        roots: folders in which each package has a version, and no more.
    """

    def __init__(self, answers: dict[str, dict[str, Any]], roots: dict[str, Path]) -> None:
        super().__init__(roots)
        self._answers = answers

    def _answer(self, package: str, question: str) -> Any:
        if question not in self._answers[package]:
            raise LookupError(
                f"upstream.json has no answer to {question!r}: a probe or a record is new. "
                "Run tests/drift/recording.py over the unpacked wheels of all releases."
            )
        return self._answers[package][question]

    def find(self, symbol: str) -> Found | None:
        if _package(symbol) not in self._answers:
            return super().find(symbol)
        answer = self._answer(_package(symbol), f"find {symbol}")
        if answer is None:
            return None
        return Found(**{**answer, "parameters": tuple(answer["parameters"])})

    def says(self, module: str, text: str) -> bool:
        if _package(module) not in self._answers:
            return super().says(module, text)
        return bool(self._answer(_package(module), f"says {module} {text}"))

    def matches(self, module: str, pattern: str) -> bool:
        if _package(module) not in self._answers:
            return super().matches(module, pattern)
        return bool(self._answer(_package(module), f"matches {module} {pattern}"))

    def names(self, module: str) -> list[str]:
        if _package(module) not in self._answers:
            return super().names(module)
        return list(self._answer(_package(module), f"names {module}"))

    def imports(self, module: str, package: str) -> list[str]:
        if _package(module) not in self._answers:
            return super().imports(module, package)
        return list(self._answer(_package(module), f"imports {module} {package}"))


def _ask(sources: Sources) -> None:
    """Every question that a patch could ask, on whatever it might be asked."""
    look = Look(detect(sources), sources)
    for patch in registry():
        patch.needed(look)
        for symbol in patch.relies_on:
            sources.find(symbol.path)
        for seam in (*patch.replaces, *patch.provides):
            sources.find(seam)
            sources.names(seam.partition(":")[0])
    sources.unresolved(GENERATOR, "vllm")


def main(folder: Path) -> None:
    """Writes upstream.json: for each package, question -> the answers and who gives them."""
    packages = {
        name: {p.parent.name.split("-")[1]: p for p in folder.glob(f"{name}-*/{name}")}
        for name in RECORDED
    }
    known: dict[str, dict[str, dict[str, Any]]] = {n: {} for n in RECORDED}
    for release, root in packages["transformers"].items():
        recorder = Recorder({"transformers": root})
        _ask(recorder)
        known["transformers"][release] = recorder.answers["transformers"]
    # All pairs: a vLLM is asked what each generator imports.
    for vllm, vllm_root in packages["vllm"].items():
        for speculators, speculators_root in packages["speculators"].items():
            recorder = Recorder({"vllm": vllm_root, "speculators": speculators_root})
            _ask(recorder)
            known["vllm"].setdefault(vllm, {}).update(recorder.answers["vllm"])
            known["speculators"].setdefault(speculators, {}).update(
                recorder.answers["speculators"]
            )
    RECORD.write_text(_lines({n: _by_answer(known[n]) for n in RECORDED}))


def _lines(record: dict[str, dict[str, Any]]) -> str:
    """JSON with one answer on a line, so that a difference can be read."""
    parts = []
    for package, part in record.items():
        questions = ",\n".join(
            f"  {json.dumps(question)}: [\n"
            + ",\n".join(f"   {json.dumps(entry, sort_keys=True)}" for entry in entries)
            + "\n  ]"
            for question, entries in part["questions"].items()
        )
        parts.append(
            f' {json.dumps(package)}: {{\n  "releases": {json.dumps(part["releases"])},\n'
            f'  "questions": {{\n{questions}\n }}}}'
        )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _by_answer(known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    releases = sorted(known, key=Version)
    questions: dict[str, Any] = {}
    for question in sorted({q for answers in known.values() for q in answers}):
        entries: list[dict[str, Any]] = []
        for release in releases:
            if question not in known[release]:
                continue
            answer = known[release][question]
            for entry in entries:
                if entry["answer"] == answer:
                    entry["releases"].append(release)
                    break
            else:
                entries.append({"answer": answer, "releases": [release]})
        questions[question] = entries
    return {"releases": releases, "questions": questions}


def read() -> dict[str, dict[str, dict[str, Any]]]:
    """The record: package -> release -> question -> answer."""
    record = json.loads(RECORD.read_text())
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for package, part in record.items():
        result[package] = {release: {} for release in part["releases"]}
        for question, entries in part["questions"].items():
            for entry in entries:
                for release in entry["releases"]:
                    result[package][release][question] = entry["answer"]
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
