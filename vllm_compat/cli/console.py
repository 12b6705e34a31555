"""Output for people: through rich on a terminal if it is there, plain text otherwise."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

__all__ = ["Console", "any_encoding", "human_bytes", "only_results_on_stdout"]

_LINE_EVERY = 10.0  # seconds between lines of progress where there is no terminal


class Console:
    """One stream.

    Args:
        stream: by default standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._rich = _rich_console(self.stream)

    def line(self, text: str = "", style: str = "") -> None:
        """One line; ``style`` is a colour of rich's, for terminals."""
        if self._rich is None:
            self.stream.write(text + "\n")
            self.stream.flush()
        else:
            self._rich.print(text, style=style or None, markup=False, highlight=False)

    def heading(self, text: str) -> None:
        """A line that stands out from what follows it."""
        self.line(text, style="bold")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[str] = (),
        styles: Sequence[str] = (),
    ) -> None:
        """A table.

        Args:
            columns: headings.
            rows: cells, as many in each row as there are columns.
            right: headings of the columns that are aligned to the right.
            styles: a colour for each row, or none.
        """
        if self._rich is not None:
            self._rich_table(columns, rows, right, styles)
            return
        widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
        for row in [columns, *rows]:
            cells = [
                cell.rjust(width) if name in right else cell.ljust(width)
                for cell, width, name in zip(row, widths, columns, strict=True)
            ]
            self.line(("  " + "  ".join(cells)).rstrip())

    def _rich_table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[str],
        styles: Sequence[str],
    ) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name in right else "left")
        for index, row in enumerate(rows):
            table.add_row(
                *map(Text, row), style=(styles[index] or None) if index < len(styles) else None
            )
        assert self._rich is not None
        self._rich.print(table)

    @contextlib.contextmanager
    def progress(self, total: int, doing: str) -> Iterator[Callable[[int], None]]:
        """A bar on a terminal; a line every ten seconds where there is none.

        Args:
            total: how much there is to do.
            doing: what is done, in a word or two.

        Yields:
            A function to call with how much was done since the last call; from one thread.
        """
        if self._rich is None:
            yield self._plain_progress(total, doing)
            return
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda done: bar.advance(task, done)

    def _plain_progress(self, total: int, doing: str) -> Callable[[int], None]:
        done, last = 0, time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            if time.monotonic() - last >= _LINE_EVERY:
                last = time.monotonic()
                self.line(f"{doing}: {done} of {total}")

        return advance


def _rich_console(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    return RichConsole(file=stream, soft_wrap=True)


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """Sends what libraries and worker processes print to standard error meanwhile.

    vLLM logs to standard output; what a command finds must not be mixed with it in a pipe.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed by whoever started us
        yield
        return
    try:
        os.dup2(2, 1)
        # Not every sys.stdout writes to descriptor 1: a notebook's doesn't.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def any_encoding() -> Iterator[None]:
    """Writes what a stream's encoding can't say as an escape (``\\xb1``) meanwhile.

    An encoding is ascii with ``PYTHONIOENCODING``, in a C locale, and under some schedulers;
    and a path of bytes that are no UTF-8 can't be written in any.
    """
    streams = [s for s in (sys.stdout, sys.stderr) if isinstance(s, io.TextIOWrapper)]
    errors = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, before in zip(streams, errors, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=before)


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as disks are sold: ``1.2 GB``."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
