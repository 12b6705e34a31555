"""Every command in the documents is one that somebody has run.

Each is on the list below, with the test that runs it or where it was run. A command that isn't
on the list fails; so does an entry that no document has any more. vllm-compat's own command
lines are also read by its own parser, so that an option that was renamed is found here.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from vllm_compat.cli import _parser, run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

COPIED = "copied from a run"  # the output stands below the command
BY_HAND = "run by hand, on the machine that the page names"

# The beginning of a command, and what runs it.
KNOWN = {
    "python3 scripts/demo.py --example eagle3_smollm2": "tests/test_draft.py::test_a_short_form",  # noqa: E501
    "python examples/eagle3_smollm2/run.py": "tests/test_draft.py::test_a_short_form",
    "python3 scripts/demo.py": "tests/test_demo.py::test_demo_from_checkpoint_to_verdict",
    "python3 scripts/test.py": ".ci/run",
    "python3 scripts/release.py": "tests/test_release.py::test_the_metadata",
    "vllm-compat doctor --quick": "tests/cli/test_doctor.py::test_quick_looks_at_files_only",
    "vllm-compat doctor": "tests/cli/test_doctor.py::test_in_full",
    "vllm-compat verify": "tests/cli/test_verify.py::test_right_states_pass",
    "vllm-compat estimate": "tests/cli/test_estimate.py::test_tokens_are_those_of_the_preprocessing",  # noqa: E501
    "vllm-compat run -m": "tests/cli/test_run.py::test_a_module",
    "vllm-compat run": "tests/cli/test_run_engine.py::test_spawned_workers_and_the_files",
    "vllm-compat check": "tests/cli/test_files.py::test_missing_files_are_named",
    "vllm-compat drift": "tests/drift/test_faults.py::test_the_command_names_symbol_patch_and_consequence",  # noqa: E501
    "vllm-compat extract": "tests/extract/test_run.py::test_the_files_are_those_of_speculators",
    "pip install --dry-run vllm_compat": COPIED,
    "pip install vllm_compat": COPIED,
    "pip freeze": COPIED,
    "diff before after": COPIED,
    "pip install vllm-compat": "tests/patching/test_wheel.py::test_runs_from_the_wheel",
    "pip install 'vllm-compat[ray]'": "tests/patching/test_wheel.py::test_asks_for_nothing_that_is_the_users_own",  # noqa: E501
    "uv pip install": BY_HAND,
    "printf": BY_HAND,
    "apt-get install": BY_HAND,
    "uv tool run nox": "tests/matrix/test_ci_cells.py::test_cell",
    "python -m pytest tests/families": "tests/families/test_families.py::test_rows_are_those_of_transformers",  # noqa: E501
    "python -m tests.families.report": "tests/families/test_report.py::test_page_is_made_from_the_results",  # noqa: E501
    "python benchmarks/": BY_HAND,
    "python tests/guest/upstream.py": BY_HAND,
    "python tests/drift/recording.py": BY_HAND,
    "python constraints/compile.py": BY_HAND,
    "python constraints/cells.py": "tests/versions/test_pins.py::test_the_command_prints_a_requirements_file",  # noqa: E501
    "python scripts/patch_table.py": "tests/patching/test_records.py::test_page_is_made_from_the_records",  # noqa: E501
    "python scripts/tested_table.py": "tests/versions/test_tested.py",
    "pytest -p no:cacheprovider --tb=no tests/v1": BY_HAND,
    "TMPDIR=": BY_HAND,
    "mkdir sources": BY_HAND,
}  # fmt: skip
# Of the shell, and of the texts around it.
NO_COMMANDS = re.compile(r"(#|done$|wait$|for |do$|\.\.\.$)")


def _shell_lines(page: Path) -> list[str]:
    """Commands of a page's code blocks: logical lines, without prompt, comment and output."""
    text = page.read_text("utf-8")
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [(m[1], m[2]) for m in fence.finditer(text) if m[1] in ("", "sh", "console")]
    for match in re.finditer(r"(?:^(?: {4}.*)?\n)+", fence.sub("", text), re.MULTILINE):
        blocks.append(("", re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE)))
    commands = []
    for kind, block in blocks:
        lines = re.sub(r" *\\\n\s*", " ", block).splitlines()
        if kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        elif kind == "":  # output, drawings, and commands
            lines = [line for line in lines if _looks_like_a_command(line)]
        for line in lines:
            bare = re.sub(r"(^|\s)#.*", "", line).strip()
            bare = re.sub(r"^(exec|CUDA_VISIBLE_DEVICES=\S+|VLLM_COMPAT_\w+=\S+) ", "", bare)
            bare = re.sub(r"\s*(&|\|\| exit 1)$", "", bare)
            commands += [c.strip() for c in bare.split(";") if c.strip()]
    return [c for c in commands if not NO_COMMANDS.match(c)]


def _looks_like_a_command(line: str) -> bool:
    first = line.split(" ", 1)[0]
    return first in {
        "vllm-compat",
        "pip",
        "uv",
        "python",
        "python3",
        "pytest",
        "mkdir",
        "exec",
    } or (first.startswith("TMPDIR="))


COMMANDS = [
    pytest.param(page, command, id=f"{page.name}: {command[:60]}")
    for page in PAGES
    for command in _shell_lines(page)
]


def _entry(command: str) -> str | None:
    return next((known for known in KNOWN if command.startswith(known)), None)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 40
    assert {page.name for page in PAGES} >= {"README.md", "start.md", "cli.md", "scaling.md"}


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_somebody_has_run_it(page: Path, command: str) -> None:
    assert _entry(command) is not None, f"{page.name}: who runs {command!r}?"


def test_the_list_is_no_longer_than_the_documents() -> None:
    used = {_entry(p.values[1]) for p in COMMANDS}
    told = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert {known for known in KNOWN if known not in used and f"`{known}" not in told} == set()


@pytest.mark.parametrize("where", sorted({w for w in KNOWN.values() if " " not in w}))
def test_what_runs_it_is_there(where: str) -> None:
    file, _, name = where.partition("::")
    text = (ROOT / file).read_text("utf-8")
    assert f"def {name}(" in text if name else text


@pytest.mark.parametrize(
    ("page", "command"), [p for p in COMMANDS if p.values[1].startswith("vllm-compat ")]
)
def test_the_command_line_is_understood(page: Path, command: str) -> None:
    words = [re.sub(r"\$\w+", "0", word) for word in shlex.split(command)[1:]]
    words, target = run.split([word for word in words if word != "..."])
    parsed = _parser().parse_args(words)  # SystemExit, if it isn't
    assert parsed.command != "run" or target
