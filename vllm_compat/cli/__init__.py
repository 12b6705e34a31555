"""The command line: ``vllm-compat``, the same as ``python -m vllm_compat``.

Each command is a module with ``add(subparsers)``, which puts its parser there, and a function
that takes the parsed arguments and returns the exit status, or a function that returns it and
whose exceptions are none of ours. Nothing here imports vLLM, torch or rich before a command
needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

from .. import __version__
from ..errors import VllmCompatError
from ..extract import command as extract
from . import check, doctor, drift, estimate, run, verify
from .console import Console, any_encoding
from .errors import CommandError

__all__ = ["main"]

_COMMANDS = (run, extract, doctor, verify, check, estimate, drift)

_DESCRIPTION = """\
Runs speculators' hidden-states generator, unmodified, on the vLLM that is installed.

A first look, in this order:

  vllm-compat doctor                         does it work in this environment?
  vllm-compat verify --model MODEL           are the states those of the model?
  vllm-compat estimate --model MODEL --data DATA.jsonl --output DIR
                                             does the result fit on the disk?
  vllm-compat run data_generation_offline.py --target-model-path MODEL ...
                                             the script, as it is
  vllm-compat check DIR                      is everything there and sound?
  vllm-compat extract --model MODEL --data DATA --output DIR --replicas N
                                             conversations to files, with several generators
"""

_EPILOG = """\
Exit status: 0 all is well; 1 something is wrong, and the last lines say what; 2 the command
line was not understood. `run` ends as the script does.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: the command line without the program's name; by default ``sys.argv``'s.

    Returns:
        The exit status.

    Raises:
        SystemExit: from argparse (``--help``, a usage error), and from a script under ``run``.
    """
    with any_encoding(), _children_counted():
        outcome = _outcome(arguments)
    # A user's script runs out here: its streams, signals and exceptions are its own.
    return int(outcome() if callable(outcome) else outcome)


def _outcome(arguments: Sequence[str] | None) -> int | Callable[[], int]:
    words = list(sys.argv[1:] if arguments is None else arguments)
    words, target = run.split(words)
    parsed = _parser().parse_args(words)
    if parsed.command is None:
        _parser().print_help()
        return 2
    parsed.target = target
    try:
        outcome: int | Callable[[], int] = parsed.function(parsed)
    except (CommandError, VllmCompatError) as error:
        return _failed(parsed, str(error))
    except KeyboardInterrupt:
        Console(sys.stderr).line("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of a pipe (head, less) has gone; there is nobody left to tell.
        sys.stderr.close()
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).partition(".")[0]
        return _failed(
            parsed, f"the package {package} is missing in this environment: {error}."
        )
    except OSError as error:
        if error.filename is None:
            return _failed(parsed, f"unexpected {type(error).__name__}: {error}")
        return _failed(parsed, f"{error.filename}: {error.strerror}.")
    except Exception as error:
        return _failed(parsed, f"unexpected {type(error).__name__}: {error}")
    return outcome


@contextlib.contextmanager
def _children_counted() -> Iterator[None]:
    """Takes notice of how children end, though whoever started us ignores SIGCHLD.

    That is handed on to what one starts. Every child would seem to end well: Python takes an
    exit status that is lost for 0 (subprocess, Popen._try_wait).
    """
    ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _failed(parsed: argparse.Namespace, sentence: str) -> int:
    if parsed.debug:
        traceback.print_exc()
    if sentence.startswith("unexpected ") and not parsed.debug:
        sentence += f" (vllm-compat --debug {parsed.command} ... shows where)"
    text = f"vllm-compat {parsed.command}: {' '.join(sentence.split())}"
    Console(sys.stderr).line(text, style="red")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-compat",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vllm-compat {__version__}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in _COMMANDS:
        command.add(subparsers)
    return parser
