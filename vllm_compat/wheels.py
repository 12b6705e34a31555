"""Gets the Python files of a release from its wheel, without installing anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedEnvironmentError

__all__ = ["is_version", "unpacked"]

# Whatever this machine is: the files are only read. vLLM's wheels are for Linux, and since
# 0.9 for one stable ABI.
_TARGET = (
    "--python-version=3.12",
    "--implementation=cp",
    "--abi=cp312",
    "--abi=abi3",
    "--abi=none",
    "--platform=any",
    *(
        f"--platform=manylinux_{glibc}_x86_64"
        for glibc in ("2_39", "2_35", "2_34", "2_31", "2_28", "2_24", "2_17")
    ),
    "--platform=manylinux2014_x86_64",
    "--platform=manylinux1_x86_64",
)


def is_version(text: str) -> bool:
    """Whether a text is a PEP 440 version, as against a folder."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def unpacked(package: str, version: str, folder: Path) -> Path:
    """Downloads a wheel and unpacks its Python files and its metadata.

    Args:
        package: ``vllm``, ``speculators``: the distribution and the package in it.
        version: of the release.
        folder: where to; the wheel is removed again.

    Returns:
        The folder of the package.

    Raises:
        UnsupportedEnvironmentError: there is no pip here, or it didn't get the wheel.
    """
    wheels = folder / "wheels"
    command = [
        *_pip(), "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-cache-dir", "--only-binary=:all:", *_TARGET, "--dest", str(wheels),
        f"{package}=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or not found:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip: {done.returncode}"
        raise UnsupportedEnvironmentError(
            f"The wheel of {package} {version} was not to be had: {reason}"
        )
    target = folder / f"{package}-{version}"
    with zipfile.ZipFile(found[0]) as wheel:
        wanted = [
            name for name in wheel.namelist() if name.endswith((".py", ".dist-info/METADATA"))
        ]
        wheel.extractall(target, wanted)
    shutil.rmtree(wheels)
    return target / package


def _pip() -> list[str]:
    """pip, which an environment made by uv lacks."""
    try:
        import pip  # noqa: F401
    except ImportError:
        if uv := shutil.which("uv"):
            return [uv, "tool", "run", "--quiet", "pip"]
        if pip_ := shutil.which("pip"):
            return [pip_]
        raise UnsupportedEnvironmentError(
            "Getting a wheel needs pip or uv, and neither is here. Unpack the wheel by hand "
            "and pass the folder with --path."
        ) from None
    return [sys.executable, "-m", "pip"]
