"""The first of the README's two commands: the main job, on real vLLM, from nothing.

    python3 scripts/demo.py [--samples N] [--output DIRECTORY] ...
    python3 scripts/demo.py --example eagle3_smollm2

Sets up the environment if it isn't there, then runs run.py of an example in it,
examples/smollm2_states unless another is named; that one gets the options. Exit status 0
means that every row is right, or what else the example promises.
"""

from __future__ import annotations

import subprocess
import sys

from environment import ROOT, SetUpError, child_environment, ensure, guarded, say

EXAMPLES = ROOT / "examples"


def main() -> int:
    options = sys.argv[1:]
    example = "smollm2_states"
    if "--example" in options[:-1]:
        at = options.index("--example")
        example = options[at + 1]
        del options[at : at + 2]
    script = EXAMPLES / example / "run.py"
    if not script.is_file():
        names = ", ".join(sorted(path.parent.name for path in EXAMPLES.glob("*/run.py")))
        raise SetUpError(f"there is no example {example!r}; there are {names}")
    python = ensure("demo")
    say("[0] Environment ready")
    if not any(option.startswith("--output") for option in options):
        output = ROOT / "demo-output"
        if example != "smollm2_states":
            output /= example
        options = ["--output", str(output), *options]
    command = [str(python), str(script), *options]
    return subprocess.run(command, env=child_environment(), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(guarded(main))
