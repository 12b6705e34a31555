"""``check``: goes over the files that a run wrote."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import Console, human_bytes
from .errors import CommandError
from .numbers import at_least

if TYPE_CHECKING:
    from ..checks.files import Check

__all__ = ["add"]

_DESCRIPTION = """\
Reads every data_*.pt of a run and names those that are not sound: missing, cut off, damaged
(checksums), ids, states and mask of different lengths, states that are not finite, another
number of layers, norms unlike those of the other files at the same layer. A file that no token
is trained on (its loss mask is all zeros) is named; if all are so, the run is not sound.

  vllm-compat check training_data
  vllm-compat check training_data --json | jq -r '.bad[].file'

It needs no model and no GPU. Whether the states are those of the model is what `verify` tells.
Exit status 0: all sound; 1: not.
"""

_SHOWN = 30  # files


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "check",
        help="are the files of a run all there and sound?",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="--output-dir of the run")
    parser.add_argument(
        "--expect",
        type=at_least(0),
        metavar="N",
        help="samples that there should be (default: what the files beside them say)",
    )
    parser.add_argument(
        "--threads",
        type=at_least(1),
        metavar="N",
        help="files read at a time (default: cores)",
    )
    parser.add_argument(
        "--no-checksums",
        action="store_true",
        help="don't compare the checksums in the files: less work for a fast disk's reader",
    )
    parser.add_argument("--json", action="store_true", help="plain values")
    parser.set_defaults(function=_run)


def _run(parsed: argparse.Namespace) -> int:
    directory: Path = parsed.directory
    if not directory.is_dir():
        raise CommandError(f"{directory} is no directory.")
    # torch takes a second; a wrong path is told before.
    from ..checks.files import check_directory

    total = sum(f.stat().st_size for f in directory.glob("data_*.pt"))
    with Console(sys.stderr).progress(total >> 20, "check, MiB") as advance:
        checked = check_directory(
            directory,
            expected=parsed.expect,
            threads=parsed.threads,
            checksums=not parsed.no_checksums,
            progress=_mebibytes(advance),
        )
    if parsed.json:
        sys.stdout.write(json.dumps(_as_json(checked), indent=1) + "\n")
    else:
        _show(checked, Console())
    return 0 if checked.sound else 1


def _mebibytes(advance: Any) -> Any:
    """Small files add up."""
    rest = 0

    def progress(nbytes: int) -> None:
        nonlocal rest
        rest += nbytes
        advance(rest >> 20)
        rest &= (1 << 20) - 1

    return progress


def _show(checked: Check, console: Console) -> None:
    for note in checked.notes:
        console.line(f"note: {note}")
    for index, reason in sorted(checked.failed.items())[:_SHOWN]:
        console.line(f"note: data_{index}.pt was not written: {reason}")
    if len(checked.failed) > _SHOWN:
        console.line(f"note: ... and {len(checked.failed) - _SHOWN} more (manifest.json)")
    if checked.untrained:
        shown = _ranges(checked.untrained[:_SHOWN])
        rest = len(checked.untrained) - _SHOWN
        console.line(
            f"note: no token is trained on (loss_mask is 0) in {shown}"
            + (f" and {rest} more (--json lists all)" if rest > 0 else "")
        )
    for sentence in checked.wrong:
        console.line(f"wrong: {sentence}", style="red")
    if checked.missing:
        console.line(f"missing: {_ranges(checked.missing)}", style="red")
    bad = checked.bad
    for sample in bad[:_SHOWN]:
        console.line(f"{sample.name}: {'; '.join(sample.wrong)}", style="red")
    if len(bad) > _SHOWN:
        console.line(f"... and {len(bad) - _SHOWN} more files (--json lists all)", style="red")
    shapes = sorted({s.shape for s in checked.samples.values() if s.shape[0]})
    shown = ", ".join(f"{n} layers of {width} {dtype}" for n, width, dtype in shapes)
    console.line(
        f"{len(checked.samples)} files, {checked.tokens} tokens, {shown or 'no states'}; "
        f"{human_bytes(checked.nbytes)} in {checked.seconds:.1f} s "
        f"({human_bytes(checked.nbytes / max(checked.seconds, 1e-9))}/s)."
    )
    if checked.sound:
        but = [
            f"{count} {what}"
            for count, what in (
                (len(checked.failed), "could not be computed"),
                (len(checked.untrained), "teach nothing"),
            )
            if count
        ]
        console.line(f"All are sound{', but ' if but else ''}{', '.join(but)}.", style="green")
    else:
        parts = [f"{len(bad)} bad", f"{len(checked.missing)} missing"]
        console.line(f"NOT SOUND: {', '.join(parts)}.", style="red")


def _ranges(indices: list[int]) -> str:
    """``0-3, 7``: the names of files that are missing."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    shown = [f"data_{a}.pt" if a == b else f"data_{a}.pt to data_{b}.pt" for a, b in runs]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")


def _as_json(checked: Check) -> dict[str, Any]:
    return {
        "sound": checked.sound,
        "directory": str(checked.directory),
        "files": len(checked.samples),
        "tokens": checked.tokens,
        "bytes": checked.nbytes,
        "seconds": round(checked.seconds, 3),
        "layer_ids": checked.layer_ids,
        "missing": checked.missing,
        "failed": checked.failed,
        "untrained": checked.untrained,
        "wrong": checked.wrong,
        "notes": checked.notes,
        "bad": [{"file": s.name, "tokens": s.tokens, "wrong": s.wrong} for s in checked.bad],
    }
