"""What is in a folder, and what it was made with.

    data_{i}.pt          the samples
    manifest.json        settings, model, data, versions; counts and failures at the end
    manifest.d/          begun.json: what manifest.json will say once there is a file;
                         samples-{start}-{end}.jsonl: a line for each sample that was written
                         or failed, by the run over these samples; lock

The data files are the truth: they get their name when they are whole. The lines say what a
name can't: how many bytes there should be, how many tokens there are, why a sample has no file.

A folder belongs to the settings that its files were made with. While it has no file, it belongs
to nobody, unless another run is at work in it: a run that could not start claims nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DiskError, OutputConflictError
from .files import data_files, is_whole, leftovers, path_of, write_whole
from .settings import (
    BEGUN,
    FORMAT,
    ROUNDING,
    check_folder,
    compare,
    differences,
    read,
    roundings,
    write,
)

__all__ = ["Folder", "Outcome"]

log = logging.getLogger("vllm_compat")

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
        facts: what the files are made with: nested dicts of plain values, compared with what
            is there. Of ``settings``, what changes no more than the last bits of a state
            (``batch_size``, ``tensor_parallel_size``, ``cpus_per_replica``) is noted, not
            compared; nor are keys ``path``.
        start: first sample.
        end: one past the last; at least one sample.
        mixed_versions: go on although versions differ; both are then in the manifest.

    Attributes:
        notes: what the user should know of the folder.

    Raises:
        OutputConflictError: files of other settings, or of another program, are there; or
            another run is at work on these samples, or with other settings.
        DiskError: the folder can't be made or written to.
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
        self.notes: list[str] = []
        self._facts = facts
        self._more = path / "manifest.d"
        self._manifest = path / "manifest.json"
        self._begun = path / BEGUN
        self._claimed = False
        self._lock_fd = -1
        self._journal: Any = None
        try:
            check_folder(path, {})
            self._more.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self._more / "lock", _LOCK_FLAGS, 0o666)
            self._lock_samples()
            with self._alone():
                self._settle(mixed_versions)
            self._journal = self._open_journal()
        except OSError as error:
            self.close()
            raise DiskError(
                f"{path} can't be written to: {error.strerror or error}."
            ) from error
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
        """Adds lines. A disk that is too full for them loses nothing: the files are there.

        Raises:
            OutputConflictError: meanwhile another run claimed the folder with other settings,
                on a file system without locks.
        """
        claim = False
        with contextlib.suppress(OSError):
            for outcome in outcomes:
                self._journal.write(outcome.line() + "\n")
                claim |= outcome.status == "written"
            self._journal.flush()
        if claim and not self._claimed:
            with self._alone(), contextlib.suppress(DiskError):
                self._claim()

    # -- what came of it -------------------------------------------------------------------

    def finish(
        self, total: int, devices: Iterable[str] = (), also: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Writes ``sample_lengths.json`` and the counts in ``manifest.json``.

        Neither is written if there is no file and no failure to tell of.

        Args:
            total: samples of the data, those of other shards included.
            devices: what computed.
            also: more keys for the manifest.

        Returns:
            The counts: ``samples``, ``written``, ``failed`` (reasons by index), ``missing``.

        Raises:
            DiskError: no room for them.
        """
        with self._alone():
            noted = self._noted()
            there = {i for i, _ in data_files(self.path)}
            for index, part in leftovers(self.path):
                # Its writer was killed (a machine was lost), and another wrote the sample.
                if self.start <= index < self.end and index in there:
                    part.unlink(missing_ok=True)
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
            missing = total - len(there) - len(failed)
            counts = {"samples": total, "written": len(there), "missing": missing}
            if not there and not failed:
                return {**counts, "failed": failed}
            # Read by the training of speculators from 0.4.0 on.
            write_whole(
                self.path / "sample_lengths.json", json.dumps(lengths, indent=2).encode()
            )
            self._claim()
            manifest = {**read(self._manifest), **(also or {})}
            manifest["counts"] = {**counts, "failed": len(failed)}
            manifest["failed"] = failed
            manifest["devices"] = sorted({*manifest.get("devices", []), *devices})
            write(self._manifest, manifest)
            return {**counts, "failed": failed}

    # -- inside ----------------------------------------------------------------------------

    def _settle(self, mixed_versions: bool) -> None:
        """Compares with what is there; what belongs to nobody any more is taken over."""
        there = self._owner()
        if there is None:
            for stale in (self._manifest, *self._journals()):
                stale.unlink(missing_ok=True)
            write(self._begun, {"format": FORMAT, **self._facts})
            return
        versions = self._facts.get("versions")
        note_versions = mixed_versions and versions != there.get("versions")
        compare(self.path, there, self._facts, mixed_versions)
        settings = self._facts.get("settings", {})
        others = list(roundings(there, settings))
        if others:
            self.notes.append(
                f"the files that are there were computed with {', '.join(others)}: states of "
                "this run can differ from what that run would have computed in their last bits"
            )
        now = {k: settings[k] for k in ROUNDING if k in settings} if others else None
        for key, value in (
            ("also_versions", note_versions and versions),
            ("also_settings", now),
        ):
            if value and value not in there.setdefault(key, []):
                there[key].append(value)
        write(self._manifest if self._manifest.exists() else self._begun, there)

    def _owner(self) -> dict[str, Any] | None:
        """What the files are made with that are there or on their way; None: nobody's."""
        found = next((p for p in (self._manifest, self._begun) if p.exists()), None)
        if found is None:
            return None
        there = read(found)
        if next(data_files(self.path), None) or self._others_at_work():
            return there
        # Without a file, what is left are reasons why samples failed: for the same settings.
        same = there.get("format") == FORMAT and not any(differences(there, self._facts))
        return there if same else None

    def _claim(self) -> None:
        """Gives the folder to these settings: there is something of theirs in it."""
        if self._claimed:
            return
        if self._manifest.exists():
            # Locks keep others out; where there are none, this is the last look.
            there = read(self._manifest)
            facts = {**self._facts, "versions": there.get("versions")}
            compare(self.path, there, facts)
        else:
            write(self._manifest, read(self._begun))
        self._claimed = True

    def _journals(self) -> list[Path]:
        # By time: the last word on a sample counts.
        return sorted(self._more.glob("samples-*.jsonl"), key=lambda p: p.stat().st_mtime)

    def _noted(self) -> dict[int, Outcome]:
        noted = {}
        for path in self._journals():
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

    def _others_at_work(self) -> bool:
        """Whether another process has samples locked. Not known where there are no locks."""
        # struct flock of Linux (fcntl(2)): type, whence, start, length, pid.
        asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, _SUMMARY_BYTE, 0)
        with contextlib.suppress(OSError):
            answer = fcntl.fcntl(self._lock_fd, fcntl.F_GETLK, asked)
            return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)
        return False

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
