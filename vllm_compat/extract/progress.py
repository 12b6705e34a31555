"""Progress over all replicas: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from typing import Any, TextIO

__all__ = ["Progress"]

_EVERY = 10.0  # seconds
_FIRST = 0.5  # seconds; samples of the first batch come together, and say nothing of the speed
_SILENT = 300.0  # seconds after which a replica is not counted any more


class Progress:
    """Counts samples and tokens.

    Args:
        stream: where it is shown.
        done: samples that are there already.
        total: samples of the run.
    """

    def __init__(self, stream: TextIO, done: int, total: int) -> None:
        self._stream = stream
        self._began: float | None = None
        self._last = time.monotonic()
        self._done, self._total = done, total
        self._failed = self._tokens = 0
        self._replicas: dict[str, float] = {}
        self._bar: Any = None
        if stream.isatty():
            self._bar = _bar(stream, done, total)

    def add(self, tokens: int, failed: bool, replica: str = "") -> None:
        """One sample more."""
        self._done += 1
        self._failed += failed
        now = time.monotonic()
        if self._began is None:
            self._began = now  # before, replicas were starting
        if now - self._began >= _FIRST:
            self._tokens += tokens
        if replica:
            self._replicas[replica] = now
        if self._bar is not None:
            bar, task = self._bar
            bar.update(task, completed=self._done, speed=self._speed())
        elif time.monotonic() - self._last >= _EVERY:
            self._last = time.monotonic()
            parts = [f"{self._done} of {self._total} samples", self._speed()]
            self.say(", ".join(filter(None, parts)))

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is not None:
            self._bar[0].console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def _speed(self) -> str:
        parts, now = [], time.monotonic()
        if self._began is not None and self._tokens:
            parts.append(f"{self._tokens / (now - self._began):.0f} tokens/s")
        heard = sum(now - last < _SILENT for last in self._replicas.values())
        if heard > 1:
            parts.append(f"{heard} replicas")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)


def _bar(stream: TextIO, done: int, total: int) -> Any:
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        return None
    bar = bars.Progress(
        bars.TextColumn("states"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[speed]}"),
        bars.TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
    task = bar.add_task("states", total=total, completed=done, speed="")
    bar.start()
    return bar, task
