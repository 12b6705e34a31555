"""What is in a folder, and what it was made with.

    data_{i}.pt          the samples
    manifest.json        settings, model, data, versions; counts and failures at the end
    manifest.d/          samples-{start}-{end}.jsonl: a line for each sample that was written
                         or failed, by the run over these samples; lock

The data files are the truth: they get their name when they are whole. The lines say what a
name can't: how many bytes there should be, how many tokens there are, why a sample has no file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import OutputConflictError
from .files import data_files, is_whole, leftovers, path_of, write_whole

__all__ = ["Folder", "Outcome"]

log = logging.getLogger("vllm_compat")

_FORMAT = 1
_LATER = ("cpus_per_replica",)  # not noted by the first versions; nothing to compare with
_LOCK_FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
_SUMMARY_BYTE = 1 << 40  # of the lock file; the bytes below stand for samples


@dataclass(frozen=True)
class Outcome:
    """What became of one sample.

    Attributes:
        index: of the sample.
        status: ``written``, or ``failed``.
        tokens: in the file.
        nbytes: of the file.
        reason: why it failed.
    """

    index: int
    status: str
    tokens: int = 0
    nbytes: int = 0
    reason: str = ""

    def line(self) -> str:
        """As a line of JSON."""
        if self.status == "failed":
            return json.dumps({"index": self.index, "failed": self.reason})
        return json.dumps({"index": self.index, "tokens": self.tokens, "bytes": self.nbytes})

    @classmethod
    def of_line(cls, line: str) -> Outcome | None:
        """From a line; None if it was cut off."""
        try:
            entry = json.loads(line)
            if "failed" in entry:
                return cls(int(entry["index"]), "failed", reason=str(entry["failed"]))
            tokens, nbytes = int(entry["tokens"]), int(entry["bytes"])
            return cls(int(entry["index"]), "written", tokens, nbytes)
        except (ValueError, KeyError, TypeError):
            return None


class Folder:
    """The output folder of a run over the samples ``[start, end)``.

    Args:
        path: made if it isn't there.
        facts: what decides about the bytes: nested dicts of plain values, compared with what
            is there. Keys ``path`` are told, not compared.
        start: first sample.
        end: one past the last.
        mixed_versions: go on although versions differ; both are then in the manifest.

    Raises:
        OutputConflictError: files of other settings, or of another program, are there; or
            another run is at work on these samples.
    """

    def __init__(
        self,
        path: Path,
        facts: dict[str, Any],
        start: int,
        end: int,
        mixed_versions: bool = False,
    ) -> None:
        self.path = path
        self.start, self.end = start, end
        self._more = path / "manifest.d"
        self._manifest = path / "manifest.json"
        if not self._manifest.exists() and path.exists() and next(data_files(path), None):
            raise OutputConflictError(
                f"{path} has data files and no manifest.json: another program wrote them. "
                "Take another folder."
            )
        self._more.mkdir(parents=True, exist_ok=True)
        self._lock_fd = os.open(self._more / "lock", _LOCK_FLAGS, 0o666)
        self._journal: Any = None
        try:
            self._lock_samples()
            with self._alone():
                self._settle(facts, mixed_versions)
            self._journal = self._open_journal()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the samples."""
        if self._journal is not None:
            with contextlib.suppress(OSError):  # told before, if it is the disk
                self._journal.close()
            self._journal = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is there ---------------------------------------------------------------------

    def scan(self, tokens: list[int], retry_failed: bool = False) -> dict[int, Outcome]:
        """What became of this run's samples so far; begun files are removed.

        Args:
            tokens: how many each sample has in its file, by index; for files that were
                written by a run that was stopped before it could note them.
            retry_failed: forget failures.
        """
        for index, part in leftovers(self.path):
            if self.start <= index < self.end:
                part.unlink(missing_ok=True)
        noted = self._noted()
        found: dict[int, Outcome] = {}
        sizes = {i: n for i, n in data_files(self.path) if self.start <= i < self.end}
        for index, nbytes in sizes.items():
            entry = noted.get(index)
            if entry is not None and entry.nbytes == nbytes:
                found[index] = entry
            elif entry is not None and entry.status == "written":
                log.warning(
                    "data_%d.pt has %d bytes where %d were written; it is computed anew.",
                    index, nbytes, entry.nbytes,
                )  # fmt: skip
            elif is_whole(path_of(self.path, index)):
                found[index] = Outcome(index, "written", tokens[index], nbytes)
                self.note([found[index]])
        if not retry_failed:
            for index, entry in noted.items():
                if entry.status == "failed" and self.start <= index < self.end:
                    found.setdefault(index, entry)
        return found

    def note(self, outcomes: Iterable[Outcome]) -> None:
        """Adds lines. A disk that is too full for them loses nothing: the files are there."""
        with contextlib.suppress(OSError):
            for outcome in outcomes:
                self._journal.write(outcome.line() + "\n")
            self._journal.flush()

    # -- what came of it -------------------------------------------------------------------

    def finish(self, total: int, devices: Iterable[str] = ()) -> dict[str, Any]:
        """Writes ``sample_lengths.json`` and the counts in ``manifest.json``.

        Args:
            total: samples of the data, those of other shards included.
            devices: what computed.

        Returns:
            The counts: ``samples``, ``written``, ``failed`` (reasons by index), ``missing``.

        Raises:
            DiskError: no room for them.
        """
        with self._alone():
            noted = self._noted()
            there = {i for i, _ in data_files(self.path)}
            lengths = {
                str(i): noted[i].tokens
                for i in sorted(there)
                if i in noted and noted[i].status == "written"
            }
            failed = {
                str(i): entry.reason
                for i, entry in sorted(noted.items())
                if entry.status == "failed" and i not in there
            }
            # Read by the training of speculators from 0.4.0 on.
            write_whole(
                self.path / "sample_lengths.json", json.dumps(lengths, indent=2).encode()
            )
            manifest = self._read()
            missing = total - len(there) - len(failed)
            counts = {"samples": total, "written": len(there), "missing": missing}
            manifest["counts"] = {**counts, "failed": len(failed)}
            manifest["failed"] = failed
            manifest["devices"] = sorted({*manifest.get("devices", []), *devices})
            self._write(manifest)
            return {**counts, "failed": failed}

    # -- inside ----------------------------------------------------------------------------

    def _settle(self, facts: dict[str, Any], mixed_versions: bool) -> None:
        if not self._manifest.exists():
            self._write({"format": _FORMAT, **facts})
            return
        there = self._read()
        if there.get("format") != _FORMAT:
            raise OutputConflictError(
                f"{self._manifest} is of format {there.get('format')!r}; this version of "
                f"vllm-compat writes format {_FORMAT}."
            )
        if mixed_versions and facts.get("versions") != there.get("versions"):
            also = there.setdefault("also_versions", [])
            if facts["versions"] not in also:
                also.append(facts["versions"])
                self._write(there)
            facts = {**facts, "versions": there.get("versions")}
        differences = list(_differences(there, facts))
        if differences:
            versions = all(d.startswith("versions.") for d in differences)
            hint = (
                "Go on with --mixed-versions, or take another folder."
                if versions
                else "Take another folder, or the same settings."
            )
            raise OutputConflictError(
                f"{self.path} was written with other settings: {'; '.join(differences)}. {hint}"
            )

    def _read(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self._manifest.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise OutputConflictError(f"{self._manifest} can't be read: {error}") from error
        if not isinstance(manifest, dict):
            raise OutputConflictError(f"{self._manifest} is no manifest.")
        return manifest

    def _write(self, manifest: dict[str, Any]) -> None:
        write_whole(self._manifest, (json.dumps(manifest, indent=2) + "\n").encode())

    def _noted(self) -> dict[int, Outcome]:
        noted = {}
        # By time: the last word on a sample counts.
        for path in sorted(self._more.glob("samples-*.jsonl"), key=lambda p: p.stat().st_mtime):
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    if outcome := Outcome.of_line(line):
                        noted[outcome.index] = outcome
        return noted

    def _open_journal(self) -> Any:
        path = self._more / f"samples-{self.start}-{self.end}.jsonl"
        journal = path.open("a+b")
        if journal.tell():
            journal.seek(-1, os.SEEK_END)
            if journal.read(1) != b"\n":  # cut off when a run was stopped
                journal.write(b"\n")
        journal.close()
        return path.open("a", encoding="utf-8")

    def _lock_samples(self) -> None:
        """One byte of the lock file stands for each sample: runs may not overlap."""
        try:
            fcntl.lockf(
                self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.end - self.start, self.start
            )
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise OutputConflictError(
                    f"Another run is at work on samples {self.start} to {self.end - 1} in "
                    f"{self.path}."
                ) from error
            log.warning(
                "%s has no file locks (%s): nothing keeps two runs apart there.",
                self.path, error.strerror,
            )  # fmt: skip

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While files that all shards share are read and written."""
        with contextlib.suppress(OSError):
            fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, _SUMMARY_BYTE)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, _SUMMARY_BYTE)


def _differences(
    there: dict[str, Any], facts: dict[str, Any], under: str = ""
) -> Iterator[str]:
    for key, value in facts.items():
        before = there.get(key)
        if key == "path" or (key in _LATER and before is None):
            continue
        if isinstance(value, dict):
            yield from _differences(
                before if isinstance(before, dict) else {}, value, f"{under}{key}."
            )
        elif before != value:
            yield f"{under}{key} {json.dumps(before)} there, {json.dumps(value)} now"
