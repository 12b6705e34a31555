"""Build the wheel and the sdist of a commit, byte for byte the same every time.

    python3 scripts/release.py DIRECTORY [--commit REVISION]

What goes in is what git has, not what lies about. Times are those of the commit (or
SOURCE_DATE_EPOCH), owners and modes are fixed. The tools are those of constraints/test.txt and
constraints/vllm-0.16.0.txt: another setuptools may write other bytes. Prints SHA-256 sums.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from environment import ROOT, ensure, guarded


def git(*arguments: str) -> bytes:
    # Whoever the checkout belongs to (in a container it is often somebody else).
    command = ["git", "-C", str(ROOT), "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def unpack(commit: str, folder: Path) -> None:
    """The files of a commit, with modes that don't depend on the user's umask."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive.getmembers():
            member.mode = mode_of(member)
            archive.extract(member, folder)


def mode_of(member: tarfile.TarInfo) -> int:
    return 0o755 if member.isdir() or member.mode & 0o100 else 0o644


def normalise(sdist: Path, epoch: int) -> None:
    """setuptools' archive has the times and owners of the build; wheels it does well."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = {
            member.name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in members
            if member.isfile()
        }
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for member in members:
            member.mtime, member.mode = epoch, mode_of(member)
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.pax_headers = {}
            content = contents.get(member.name)
            archive.addfile(member, None if content is None else io.BytesIO(content))
    with open(sdist, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(plain.getvalue())


def build(python: Path, commit: str, output: Path) -> list[Path]:
    """Build both into `output`; returns their paths, sdist first."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct", commit))
    output.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="vllm-compat-") as scratch:
        tree, built = Path(scratch, "tree"), Path(scratch, "dist")
        unpack(commit, tree)
        # The wheel is made from the sdist, so that a fault of the one shows in the other.
        subprocess.run(
            [python, "-m", "build", "--no-isolation", "--outdir", built, tree],
            env=env, umask=0o022, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        (sdist,) = built.glob("*.tar.gz")
        normalise(sdist, epoch)
        (wheel,) = built.glob("*.whl")
        done = []
        for file in (sdist, wheel):
            target = output / file.name
            target.write_bytes(file.read_bytes())
            done.append(target)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--commit", default="HEAD", metavar="REVISION")
    arguments = parser.parse_args()
    for file in build(ensure("demo", "test"), arguments.commit, arguments.directory):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(guarded(main))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {error}\n{(error.stderr or b'').decode(errors='replace')}")
