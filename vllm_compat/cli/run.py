"""``run``: a script or a module as ``__main__``, with the patches on."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from ..activation import apply
from . import children
from .errors import CommandError

__all__ = ["add", "split"]

# Options of `run` itself that take a value: what follows one is not the script.
_VALUED = {
    "--transport": ("auto", "shared", "rpc"),
    "--executor": ("mp", "ray"),
    "--untested": ("warn", "refuse", "allow"),
}

_DESCRIPTION = """\
Turns the patches on, then runs SCRIPT (or -m MODULE) just as `python SCRIPT` does: as
__main__, with its own sys.argv and sys.path, its own exit status and tracebacks. Processes
that it starts by multiprocessing have the patches on as well.

  vllm-compat run data_generation_offline.py --target-model-path MODEL ...
  vllm-compat run -m my_package.generate --layers 2 14 27

Options of `run` stand before SCRIPT; all that comes after it is the script's.
"""


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "run",
        help="run an unmodified script or module with the patches on",
        usage="vllm-compat run [OPTIONS] SCRIPT [ARGS...]\n"
        "       vllm-compat run [OPTIONS] -m MODULE [ARGS...]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, choices in _VALUED.items():
        parser.add_argument(name, choices=choices, help=f"as apply({name[2:]}=...)")
    parser.add_argument(
        "--report", action="store_true", help="first write to stderr what was patched"
    )
    parser.set_defaults(function=_run)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Cuts a command line of ``run`` in front of the script.

    Args:
        words: a whole command line, of any command.

    Returns:
        What argparse is to see, and the script, or ``-m`` and the module, with its arguments.
    """
    words = list(words)
    start = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    if start is None or words[start] != "run":
        return words, []
    index = start + 1
    while index < len(words):
        word = words[index]
        if word == "--":
            return words[:index], words[index + 1 :]
        if word.startswith("-m") or not word.startswith("-"):
            return words[:index], words[index:]
        index += 2 if word in _VALUED else 1
    return words, []


def _run(parsed: argparse.Namespace) -> Callable[[], int]:
    target: list[str] = parsed.target
    if not target or target == ["-m"]:
        raise CommandError("which script? (vllm-compat run SCRIPT [ARGS...])")
    by_name = target[0].startswith("-m")
    found = None if by_name else _from_path(target[0])
    report = apply(
        transport=parsed.transport, executor=parsed.executor, untested=parsed.untested
    )
    if parsed.report:
        sys.stderr.write(f"{report}\n")
    children.apply_in_spawned(parsed.transport, parsed.executor, parsed.untested)
    if found is not None:
        code, module = found
        sys.argv = list(target)
    else:
        # Looking for a module imports the packages that it is in: after apply().
        name, arguments = target[0][2:], target[1:]
        if not name:
            name, *arguments = arguments
        code, module = _from_module(name)
        sys.argv = [str(module.__file__), *arguments]
    # For good: what the script defines is looked for here when it is pickled, and by the
    # worker processes, also after its last line (threads, atexit).
    sys.modules["__main__"] = module
    return lambda: _execute(code, module)


def _from_path(path: str) -> tuple[Callable[[], Any], types.ModuleType]:
    absolute = os.path.abspath(path)
    if os.path.isdir(absolute) or zipfile.is_zipfile(absolute):
        _first_on_path(absolute)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [absolute])
        if spec is None:
            raise CommandError(f"can't find '__main__' in {path!r}.")
        return _from_spec(spec, package="")
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    try:
        source = loader.get_data(absolute)
    except OSError as error:
        raise CommandError(f"can't open {path!r}: {error.strerror}.") from error
    _first_on_path(os.path.dirname(os.path.realpath(absolute)))
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=absolute,
        __cached__=None,
        __loader__=loader,
        __builtins__=builtins,
        __annotations__={},
    )
    return lambda: loader.source_to_code(source, absolute), module


def _from_module(name: str) -> tuple[Callable[[], Any], types.ModuleType]:
    _first_on_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # Only a parent package that is missing; what is missing in one that is there is an
        # error of its own.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # a relative name, or a module without a spec
        spec = None
    if spec is None:
        raise CommandError(f"no module named {name!r}.")
    return _from_spec(spec, package=spec.parent or "")


def _from_spec(
    spec: importlib.machinery.ModuleSpec, package: str
) -> tuple[Callable[[], Any], types.ModuleType]:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        raise CommandError(f"{spec.name!r} can't be run: it has no Python code.")
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __builtins__=builtins,
        __package__=package,
        __spec__=spec,
        __annotations__={},
    )
    return lambda: loader.get_code(spec.name), module


def _first_on_path(folder: str) -> None:
    """Puts the script's folder where Python put ours (cwd, or the folder of the command)."""
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    sys.path[0] = folder


def _execute(code: Callable[[], Any], module: types.ModuleType) -> int:
    try:
        exec(code(), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _show_as_without_us(error)
        raise
    return 0


def _show_as_without_us(error: BaseException) -> None:
    """Has the interpreter print this exception without the frames that are ours."""
    shown, hook = sys.excepthook, sys.excepthook
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and trace is not None and _frozen(trace):
        trace = None  # the script itself doesn't compile

    def print_exception(
        kind: type[BaseException], value: BaseException, current: types.TracebackType | None
    ) -> None:
        if value is error:
            current = trace
            value.__traceback__ = trace
        sys.excepthook = shown
        hook(kind, value, current)

    sys.excepthook = print_exception


def _frozen(trace: types.TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
