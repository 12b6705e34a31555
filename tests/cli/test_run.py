"""``run``: a script behaves as it does under ``python``, patches apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from vllm_compat.cli import main
from vllm_compat.cli.run import split

from .conftest import command, environment

RUN = ("-m", "vllm_compat", "run")

# Each prints, or ends, in a way that a runner could spoil.
SCRIPTS = {
    "facts": """
        import sys, os
        main = sys.modules["__main__"]
        print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__, __cached__)
        print(main.__dict__ is globals(), sorted(globals()), type(__loader__).__name__)
        x: undefined_name = 1 if False else None  # annotations are evaluated: no future import
    """,
    "guard": """
        if __name__ == "__main__":
            import sibling
            print(sibling.VALUE)
    """,
    "exit status": "import sys; sys.exit(3)",
    "exit text": "raise SystemExit('a reason')",
    "exit none": "raise SystemExit",
    "os exit": "import os; os._exit(5)",
    "error": """
        def f():
            return 1 / 0
        f()
    """,
    "chained error": """
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("later") from error
    """,
    "error in a sibling": "import sibling; sibling.fail()",
    "error of ours": """
        from vllm_compat import InvalidInputError
        raise InvalidInputError("the script's business")
    """,
    "syntax error": "def f(:\n    pass\n",
    "syntax error in a sibling": "import broken",
    "group of errors": """
        class Odd(BaseException): pass
        raise Odd("not an Exception")
    """,
    "own hook": """
        import sys, traceback
        def hook(kind, value, trace):
            print("hook", kind.__name__, [f.name for f in traceback.extract_tb(trace)])
        sys.excepthook = hook
        raise ValueError
    """,
    "pickle": """
        import pickle
        class Thing: pass
        def function(): pass
        print(pickle.loads(pickle.dumps(function)) is function)
        print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
    """,
    "after the last line": """
        import atexit, pickle, threading, time
        class Thing: pass
        atexit.register(lambda: print("atexit", type(pickle.loads(pickle.dumps(Thing())))))
        def late():
            time.sleep(0.3)
            print("thread", type(pickle.loads(pickle.dumps(Thing()))))
        threading.Thread(target=late).start()
        print("end")
    """,
    "streams": """
        import sys
        print(sys.stdin.read().upper()); print("to stderr", file=sys.stderr)
    """,
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\\xe4\u00e4'))\n",
    "warning": """
        import warnings
        warnings.warn("shown, since this is __main__", DeprecationWarning)
    """,
    "forked children": """
        import multiprocessing as mp
        def double(x): return 2 * x
        if __name__ == "__main__":
            with mp.get_context("fork").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "spawned children": """
        import multiprocessing as mp, sys
        def where(x): return x, __name__, __file__, sys.argv, sys.path[0]
        if __name__ == "__main__":
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(where, [1]))
    """,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "sibling.py").write_text("VALUE = 7\ndef fail():\n    raise OSError('sibling')\n")
    (folder / "broken.py").write_text("x = = 1\n")
    return folder


def _write(path: Path, source: str) -> Path:
    text = textwrap.dedent(source).lstrip("\n")
    path.write_bytes(text.encode("latin-1" if "latin-1" in text else "utf-8"))
    return path


@pytest.mark.parametrize("name", SCRIPTS)
def test_as_without_us(folder: Path, name: str) -> None:
    script = _write(folder / "script.py", SCRIPTS[name])
    words = ["--flag", "a b", "-m", "--", "--debug"]
    options = {"cwd": folder.parent, "input": "text"}
    plain = command([script, *words], **options)
    ours = command([*RUN, script, *words], **options)
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert ours.returncode == plain.returncode


@pytest.mark.parametrize("how", ["relative", "link", "directory", "zip"])
def test_other_ways_to_name_a_script(folder: Path, how: str) -> None:
    source = """
        import sys, sibling
        print(sys.argv, sys.path[0], __name__, __file__, __package__)
    """
    script = _write(folder / "__main__.py", source)
    target = {"relative": "scripts/__main__.py", "directory": "scripts"}.get(how, f"{how}.py")
    if how == "link":
        (folder.parent / target).symlink_to(script)
    if how == "zip":
        with zipfile.ZipFile(folder.parent / target, "w") as archive:
            for file in folder.glob("*.py"):
                archive.write(file, file.name)
    plain = command([target, "x"], cwd=folder.parent)
    ours = command([*RUN, target, "x"], cwd=folder.parent)
    assert plain.returncode == 0
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize("module", ["package", "package.inner"])
def test_a_module(folder: Path, module: str) -> None:
    source = """
        import multiprocessing as mp, sys
        from . import helper
        def where(x): return __name__, __spec__.name
        if __name__ == "__main__":
            print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__.name)
            with mp.get_context("spawn").Pool(1) as pool:
                print(pool.map(where, [1]))
            sys.exit(4)
    """
    package = folder / "package"
    package.mkdir()
    for name in ("__init__", "helper"):
        (package / f"{name}.py").touch()
    _write(package / "inner.py", source)
    # multiprocessing never imports a package's __main__ in a child
    alone = textwrap.dedent(source).partition("    with mp")[0] + "    sys.exit(4)\n"
    _write(package / "__main__.py", alone)
    plain = command(["-m", module, "a", "-b"], cwd=folder)
    ours = command([*RUN, "-m", module, "a", "-b"], cwd=folder)
    assert plain.returncode == ours.returncode == 4, plain.stderr + ours.stderr
    assert ours.stdout == plain.stdout


def test_ctrl_c_ends_it_as_without_us(folder: Path) -> None:
    script = _write(
        folder / "script.py",
        """
        import atexit, time
        atexit.register(print, "atexit")
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    found = []
    for words in ([script], [*RUN, script]):
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            # A shell starts what it puts into the background with SIGINT ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        found.append((out, err, process.returncode))
    assert found[0] == found[1]
    assert found[0][2] == -signal.SIGINT


def test_patches_are_on_in_the_script_and_in_its_children(folder: Path) -> None:
    """Also in a spawned child's spawned child: each is a new interpreter."""
    script = _write(
        folder / "script.py",
        """
        import multiprocessing as mp, sys
        from vllm_compat.activation import is_active, options
        print(__name__, is_active(), options().transport, flush=True)
        def child(depth):
            if depth:
                process = mp.get_context("spawn").Process(target=child, args=(depth - 1,))
                process.start(); process.join(); sys.exit(process.exitcode)
        if __name__ == "__main__":
            child(2)
        """,
    )
    done = command([*RUN, "--transport", "rpc", "--report", script])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ True rpc\n" + 2 * "__mp_main__ True rpc\n"
    assert "row-attribution" in done.stderr


def test_a_process_without_run_spawns_as_ever(folder: Path) -> None:
    script = _write(
        folder / "script.py",
        """
        from multiprocessing import spawn
        import vllm_compat.cli
        print(spawn.get_preparation_data.__module__, "vllm_compat" in
              spawn.get_preparation_data("x"))
        """,
    )
    assert command([script]).stdout == "multiprocessing.spawn False\n"


def test_the_installed_command(folder: Path) -> None:
    installed = Path(sys.executable).with_name("vllm-compat")
    if not installed.exists():
        pytest.skip("the package is not installed beside this Python")
    script = _write(folder / "script.py", "import sys; print(sys.argv, sys.path[0])")
    done = subprocess.run(
        [installed, "run", script, "x"], capture_output=True, text=True, env=environment()
    )
    assert done.stdout == f"{[str(script), 'x']} {folder}\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.py"], "can't open 'nothing.py': No such file or directory."),
        (["-m", "nothing"], "no module named 'nothing'."),
        (["-m", "os.nothing"], "no module named 'os.nothing'."),
        (["-m", "json"], "no module named 'json.__main__'."),
        (["."], "can't find '__main__' in '.'."),
        ([], "which script?"),
        (["-m"], "which script?"),
    ],
)
def test_what_cannot_be_run_is_told_in_a_sentence(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    done = command([*RUN, *words], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_debug_shows_where(tmp_path: Path) -> None:
    done = command(["-m", "vllm_compat", "--debug", "run", "nothing.py"], cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("can't open 'nothing.py': No such file or directory.\n")


def test_an_environment_that_does_not_fit_is_told_in_a_sentence(folder: Path) -> None:
    script = _write(folder / "script.py", "print('ran')")
    done = command([*RUN, script], env={"VLLM_COMPAT_SKIP": "no-such-patch"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "vllm-compat run: VLLM_COMPAT_SKIP names no patch of ours: no-such-patch.\n"
    )


@pytest.mark.parametrize(
    ("line", "ours", "target"),
    [
        ("run s.py --json -m x", "run", "s.py --json -m x"),
        ("run --transport rpc s.py", "run --transport rpc", "s.py"),
        ("run --transport=rpc s.py", "run --transport=rpc", "s.py"),
        ("--debug run --report -m m --report", "--debug run --report", "-m m --report"),
        ("run -mm x", "run", "-mm x"),
        ("run -- -odd.py x", "run", "-odd.py x"),
        ("run --help", "run --help", ""),
        ("check run --json", "check run --json", ""),
        ("", "", ""),
    ],
)
def test_the_command_line_is_cut_before_the_script(line: str, ours: str, target: str) -> None:
    assert split(line.split()) == (ours.split(), target.split())


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    for name in ("run", "doctor", "verify", "check", "estimate"):
        assert name in text
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        page = capsys.readouterr().out
        assert f"vllm-compat {name}" in page
        assert len(page) > 450


def test_nothing_heavy_is_imported_for_help() -> None:
    code = (
        "import sys, vllm_compat.cli as c\n"
        "try: c.main(['verify', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'speculators', 'rich') "
        "if m in sys.modules])"
    )
    assert command(["-c", code]).stdout.endswith("[]\n")


def test_a_reader_that_goes_away_is_no_error(folder: Path) -> None:
    """``vllm-compat ... | head -1``"""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_compat", "doctor", "--quick"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    os.close(write)
    assert done.stderr == ""
