"""Make docs/families.md from the results of the family tests.

``python -m tests.families.report`` (from the top of the repository) writes the page from
``results.jsonl``; ``test_report.py`` fails if the two differ. ``COMMANDS`` says how to measure.

Results are appended; of several for one case (family, dtype, ranks, vLLM) the last counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .classes import CLASSES, Class
from .cpu_workarounds import WORKAROUNDS
from .registry import FAMILIES, PROMPT_LENGTHS, SIZES, TOLERANCE, Family

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"

Result = Mapping[str, Any]

RETURNS = {"hidden": "the state", "hidden+residual": "state and residual to add"}

#: What the measurements don't say.
TEXT = (
    "## What is refused",
    "",
    "A model whose states would be a guess is refused when the generator is made, with a "
    "sentence that says why (`UnsupportedModelError`):",
    "",
    "- layers that run more than once in a forward (Ouro, IQuest-LoopCoder): there is no one "
    "state after a layer;",
    "- layers that carry several streams, which are mixed into one after the last of them "
    "(Gemma 3n; hyper-connections, as in DeepSeek-V4);",
    "- layers that disagree about the residual (Chameleon-30B), or that hand on something that "
    "only the next one makes a state of: with tensor parallelism on NVIDIA GPUs, vLLM 0.32's "
    "DeepSeek-V3.2 and MiniMax-M3 leave the sum over all ranks to the next layer (read, not "
    "run);",
    "- layers of which a rank has some of the rows only (sequence parallelism), and pipeline "
    "stages.",
    "",
    "## Code of the checkpoint",
    "",
    "speculators' generator trusts a checkpoint's own code for the model and its config "
    "(`trust_remote_code=True`), and does not ask. vllm-compat makes the same decision for the "
    "tokenizer and for what vLLM loads (the image processor of Kimi-K2.5), so that nothing is "
    "asked on stdin in the middle of a run; a line in the log says when a tokenizer's own code "
    "runs. So don't point the generator at a checkpoint whose code you would not run. Without "
    "it: `VLLM_COMPAT_SKIP=tokenizer-remote-code`.",
    "",
)

COMMANDS = (
    "# The default run: the families that the registry calls fast.",
    "python -m pytest tests/families",
    "# All the others.",
    "python -m pytest tests/families -m slow_families",
    "# All, and this page from what they measured. Families that only a newer vLLM has are",
    "# skipped with a sentence; with that vLLM (constraints/cells.py has its pins) they run.",
    "VLLM_COMPAT_FAMILY_RESULTS=tests/families/results.jsonl \\",
    "    python -m pytest tests/families -m 'slow_families or not slow_families'",
    "python -m tests.families.report",
)


def read(path: Path = RESULTS) -> list[Result]:
    """The results, the last one of each case, in the order of the registry."""
    last: dict[tuple[Any, ...], Result] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            result = json.loads(line)
            version = result.get("versions", {}).get("vllm")
            last[result["family"], result["checkpoint"], result["ranks"], version] = result
    order = {family.name: i for i, family in enumerate(FAMILIES)}
    return sorted(last.values(), key=lambda r: (order.get(r["family"], -1), r["ranks"]))


def tidy(path: Path = RESULTS) -> None:
    """Keep only what counts, so that the file doesn't grow."""
    path.write_text("".join(json.dumps(result) + "\n" for result in read(path)))


def render(results: Iterable[Result]) -> str:
    """The page."""
    results = list(results)
    by_family: dict[str, list[Result]] = {}
    for result in results:
        by_family.setdefault(result["family"], []).append(result)
    lengths = ", ".join(map(str, PROMPT_LENGTHS))
    parts = [
        "# Model families",
        "",
        "<!-- Made by tests/families/report.py from tests/families/results.jsonl. -->",
        "",
        "Each family is a checkpoint with random weights "
        f"({SIZES['num_hidden_layers']} layers or a few more, {SIZES['hidden_size']} columns), "
        "made on the fly and run on a CPU through the unmodified generator. All layers are "
        f"captured; prompts of {lengths} tokens share one `generate()` call. The error is that "
        "of the worst row of all layers and prompts, `|got - reference| / |reference|`, "
        "against transformers' own float32 states. A row that belongs to another token is off "
        "by about 1.",
        "",
        "A test passes up to "
        + ", ".join(f"{value:g} in {dtype}" for dtype, value in TOLERANCE.items())
        + ".",
        "",
        "| family | vLLM class | vLLM | computes in | ranks | layers return | largest error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        parts += [row(family, result) for result in by_family.get(family.name, [])]
    parts += ["", "## Notes", ""]
    for family in FAMILIES:
        if family.name in by_family and family.note:
            parts.append(f"- {family.title}: {family.note}")
    parts += [
        "",
        "## What the tests work round",
        "",
        "In the test harness only, for what vLLM's CPU backend can't compute; none of it is "
        "part of vllm-compat, and none of it is on where a family isn't named.",
        "",
    ]
    for name, workaround in WORKAROUNDS.items():
        users = [
            family.title
            for family in FAMILIES
            if name in family.workarounds and family.name in by_family
        ]
        who = ", ".join(users) or "all runs in float32"
        parts.append(f"- `{name}` ({who}): {workaround.why}")
    no_mla = [
        family.title
        for family in FAMILIES
        if "VLLM_MLA_DISABLE" in family.env and family.name in by_family
    ]
    parts.append(
        f"- `VLLM_MLA_DISABLE=1` ({', '.join(no_mla)}): the CPU backend has no MLA kernel; "
        "vLLM then runs the same attention as multi-head attention."
    )
    parts += [
        "",
        "## Classes without an engine",
        "",
        "For these transformers has neither config nor weights, so that there is nothing to "
        "compare rows with. vLLM's own class is built from a config of tiny sizes, with "
        "random weights, and the trial of the set-up runs on it. What it finds out is what was "
        "read in vLLM's source (0.16.0).",
        "",
        "| vLLM class | layers | layers return |",
        "| --- | --- | --- |",
        *(class_row(which) for which in CLASSES.values() if not which.broken),
        "",
        *TEXT,
    ]
    tested = sorted(
        {
            f"vLLM {v['vllm']}, speculators {v['speculators']}, transformers "
            f"{v['transformers']}, torch {v['torch']}"
            for v in (result.get("versions") for result in results)
            if v
        }
    )
    parts += ["## Versions", "", *(f"- {line}" for line in tested)]
    parts += ["", "## Measure again", "", "```sh", *COMMANDS, "```", ""]
    return "\n".join(parts)


def row(family: Family, result: Result) -> str:
    version = result.get("versions", {}).get("vllm", "").partition("+")[0]
    if "refused" in result:
        cells = (family.title, f"`{family.vllm_class}`", version, "", str(result["ranks"]), "")
        return f"| {' | '.join(cells)} | refused |"
    dtype = result["dtype"]
    if result["checkpoint"] == "auto":
        dtype += " (float32 checkpoint)"
    cells = (
        family.title,
        f"`{result['vllm_class']}`",
        version,
        dtype,
        str(result["ranks"]),
        RETURNS[result["convention"]],
        f"{result['largest_error']:.1e}",
    )
    return f"| {' | '.join(cells)} |"


def class_row(which: Class) -> str:
    returns = RETURNS.get(which.convention, "refused")
    layers = f"`{which.layers}`" if which.layers else ""
    note = f" ({which.title})" if which.title else ""
    return f"| `{which.architecture}`{note} | {layers} | {returns} |"


def main() -> None:
    tidy()
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(read()))
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
