"""Drivers of every kind: where their main module comes from, and how they and workers end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from guest.processes import HANGS, Zygote, environment

from .generators import is_gone, kill, waited

pytest.importorskip("vllm")

GENERATE = """
import sys
from processes.generators import PROMPTS, make, states
generator = make({checkpoint!r})
rows = states(generator)
print("ROWS", [[len(layer) for layer in layers] for layers in rows])
print("MAIN", getattr(sys.modules["__main__"], "__file__", None))
"""
ROWS = "ROWS [[3, 3], [50, 50], [1, 1]]"


def run(
    words: Sequence[str | Path], text: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs Python; the interpreter's own words at exit are not lost."""
    return subprocess.run(
        [sys.executable, *words], input=text, env=environment(), cwd=cwd,
        capture_output=True, text=True, timeout=HANGS, check=False,
    )  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["stdin", "command", "interactive", "deleted"])
def test_a_main_module_without_a_file(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """Spawned workers import the main file, if its module has one."""
    code = GENERATE.format(checkpoint=str(checkpoint))
    if kind == "stdin":
        done, main = run(["-"], code, tmp_path), "<stdin>"
    elif kind == "command":
        done, main = run(["-c", code]), "None"
    elif kind == "interactive":
        done, main = run(["-i"], code), "None"
    else:
        script = tmp_path / "script.py"
        script.write_text(f"import os; os.remove(__file__)\n{code}")
        done, main = run([script]), str(script)
    assert ROWS in done.stdout, done.stderr[-3000:]
    assert f"MAIN {main}" in done.stdout
    assert "Exception ignored" not in done.stderr


# -- the end of the driver -------------------------------------------------------------------

AT_EXIT = """
import sys, threading
from processes.generators import make, states

class Owner:
    kept = None

if __name__ == "__main__":
    generator = make(sys.argv[1])
    states(generator)
    if sys.argv[2] == "class":
        Owner.kept = generator
        del generator
    elif sys.argv[2] == "cycle":
        generator.itself = generator
        del generator
    elif sys.argv[2] == "module":
        threading.kept = generator
    elif sys.argv[2] == "error":
        raise SystemExit(3)
"""


@pytest.mark.engine
@pytest.mark.parametrize("kept", ["global", "class", "cycle", "module", "error"])
def test_python_ends_while_a_generator_is_alive(
    checkpoint: Path, tmp_path: Path, kept: str
) -> None:
    """Its __del__ runs when half of the modules are empty already."""
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    done = run([script, checkpoint, kept])
    assert done.returncode == (3 if kept == "error" else 0), done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr, done.stderr[-3000:]
    assert "died unexpectedly" not in done.stdout + done.stderr
    assert "leaked" not in done.stderr


FORKS = """
import os, sys, time
from processes.generators import make
if __name__ == "__main__":
    generator = make(sys.argv[1])
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    print("PIDS", child, *generator.executor.worker_pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.engine
def test_a_worker_does_not_outlive_its_driver_in_a_fork_of_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A fork made before vLLM's pipe could be closed has it; closed or not, the pid says it."""
    script = tmp_path / "script.py"
    # Without what closes the pipe in a fork: a fork by a library in C doesn't run that.
    script.write_text(FORKS.replace("child = os.fork()", "import ctypes\n"
        "    child = ctypes.CDLL(None).fork()"))  # fmt: skip
    driver = subprocess.Popen(
        [sys.executable, str(script), str(checkpoint)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert driver.stdout is not None
        line = next(line for line in driver.stdout if line.startswith("PIDS "))
        pids = [int(word) for word in line.split()[1:]]
        child, worker = pids
        assert not is_gone(worker)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        assert waited(lambda: is_gone(worker), 30), "the worker is still there"
        assert not is_gone(child)
    finally:
        kill(driver.pid, *pids)


FORK_ENDS = """
import os, sys
from processes.generators import make, states
if __name__ == "__main__":
    generator = make(sys.argv[1])
    child = os.fork()
    if child == 0:
        sys.exit(0)  # with all that Python does at its end
    print("CHILD", os.waitpid(child, 0)[1])
    states(generator)  # the workers are still this process's
    holds = os.fork()
    if holds == 0:
        import time
        time.sleep(600)
        os._exit(0)
    generator.executor.shutdown()
    os.kill(holds, 9)
"""


@pytest.mark.engine
def test_a_fork_leaves_the_workers_alone(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORK_ENDS)
    done = run([script, checkpoint])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CHILD 0" in done.stdout
    # What a worker says when its pipe closes, which it did though another fork lives.
    assert "Parent process exited, terminating worker" in done.stdout
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr


# -- nobody counts this process's children ---------------------------------------------------

IGNORES = """
import multiprocessing, os, signal, sys, time
from processes.generators import make, states, waited
from vllm_compat import EngineDeadError

def collect(number, frame):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

if __name__ == "__main__":
    how = collect if sys.argv[2] == "collect" else signal.SIG_IGN
    signal.signal(signal.SIGCHLD, how)
    generator = make(sys.argv[1])
    states(generator)
    generator.executor.shutdown()
    print("LEFT", multiprocessing.active_children())
    generator = make(sys.argv[1])
    (worker,) = generator.executor.worker_pids
    os.kill(worker, signal.SIGKILL)
    waited(lambda: not os.path.exists(f"/proc/{worker}"), 10)
    try:
        states(generator)
    except EngineDeadError as error:
        print("SAID", str(error).replace(str(worker), "PID"))
    generator.executor.shutdown()
    print("LEFT", multiprocessing.active_children())
    print("SIGNAL", signal.getsignal(signal.SIGCHLD) == how)
"""


@pytest.mark.engine
@pytest.mark.parametrize("how", ["ignore", "collect"])
def test_a_driver_that_ignores_the_end_of_its_children(
    checkpoint: Path, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(IGNORES)
    done = run([script, checkpoint, how])
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("LEFT", "SAID"))]
    assert said[0] == "LEFT []"
    assert "worker VllmWorker-0 (pid PID) ended; how is not known" in said[1], said
    assert said[2] == "LEFT []"
    assert "SIGNAL True" in done.stdout
    assert "Exception ignored" not in done.stderr


def test_cuda_is_asked_for_where_children_are_ignored(zygote: Zygote) -> None:
    assert zygote.call("processes.test_processes:survives", False) == [True, True]
    assert zygote.call("processes.test_processes:survives", True) == [False, False]


def survives(poisoned: bool) -> list[bool]:
    """In the child: with SIGCHLD ignored, and with a handler that collects every child."""
    import torch

    from vllm_compat.worker_environment import cuda_survives_fork

    def collect(number: int, frame: object) -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    if poisoned:
        torch.cuda.is_available()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    found = [cuda_survives_fork()]
    signal.signal(signal.SIGCHLD, collect)
    return [*found, cuda_survives_fork()]


def test_the_command_line_counts_its_children(tmp_path: Path) -> None:
    """Ignoring SIGCHLD is inherited; an import that fails then looked like one that works."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[1:3] != ['-m', 'vllm_compat']: sys.exit('broken on purpose')\n"
    )
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.executable, [sys.executable, '-m', 'vllm_compat', 'doctor'])"
    )
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(broken), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True,
        timeout=HANGS, check=False,
    )  # fmt: skip
    assert "broken on purpose" in done.stdout, done.stdout + done.stderr
