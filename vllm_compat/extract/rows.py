"""The user's file of conversations, read for what is wrong with it.

speculators reads it with ``datasets``, whose errors name neither line nor row. What it wants
(``data_generation/preprocessing.py``, 0.3.0 to 0.4.0.1) is a key ``conversations``: a list of
turns, each with ``from`` and ``value`` or ``role`` and ``content``. A key ``messages`` it takes
of its own data set "ultrachat" alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from .errors import ExtractError

__all__ = ["check_beginning", "fault_in", "place", "reason_unused"]

_WANTED = (
    'wanted is {"conversations": [{"from": "human", "value": "..."}, '
    '{"from": "gpt", "value": "..."}]}'
)
_BEGINNING = 100  # rows
_WHOLE = 256 << 20  # bytes of a file that is parsed in one piece
# speculators passes over turns of other roles.
_ROLES = ("human", "user", "gpt", "assistant", "system")


def check_beginning(data: str) -> None:
    """Refuses a file that can't be of use, by its first rows; takes milliseconds.

    Args:
        data: a file, or a name that speculators knows, of which nothing is said here.

    Raises:
        ExtractError: the file, the line, and what is wanted there.
    """
    path = Path(data)
    if path.suffix not in (".json", ".jsonl"):
        if path.exists():
            raise ExtractError(f"{data}: a file whose name ends in .jsonl or .json is wanted.")
        return
    if not path.exists():
        raise ExtractError(f"There is no file {data}.")
    if not path.is_file():
        raise ExtractError(f"{data} is no file.")
    faults = []
    try:
        for where, row in islice(_rows(path), _BEGINNING):
            fault = "" if isinstance(row, dict) and "conversations" in row else _fault(row)
            if not fault:
                return
            faults.append(f"{data}, {where}: {fault}.")
    except _NotRows:
        return
    except OSError as error:
        raise ExtractError(f"{data} can't be read: {error.strerror or error}.") from error
    if not faults:
        raise ExtractError(f"{data} is empty: {_WANTED}, one for each line.")
    raise ExtractError(faults[0])


def fault_in(data: str) -> str:
    """The first row that ``datasets`` can't read, with its line; empty if none is found."""
    path = Path(data)
    if path.suffix not in (".json", ".jsonl"):
        return ""
    try:
        for where, row in _rows(path):
            if fault := _fault(row):
                return f"{data}, {where}: {fault}."
    except ExtractError as error:
        return str(error)
    except (OSError, _NotRows):
        pass
    return ""


def place(data: str, row: int) -> str:
    """Where a row of the data is: the line of a file of lines, else its number from 0."""
    path = Path(data)
    if path.suffix in (".json", ".jsonl"):
        try:
            for where, _ in islice(_rows(path), row, row + 1):
                return where
        except (ExtractError, OSError, _NotRows):
            pass
    return f"row {row}"


def reason_unused(conversation: Any) -> str:
    """Why speculators passes over a conversation; empty if its form is right."""
    if conversation is None or conversation == []:
        return "no conversation"
    if not isinstance(conversation, list):
        return f'"conversations" is {_kind(conversation)}, not a list'
    turns = [turn for turn in conversation if isinstance(turn, dict)]
    # In a file with both, `datasets` adds an empty "from" to each turn, and that one is read.
    roles = [turn.get("from", turn.get("role", "")) for turn in turns]
    if any(turn.get("role") for turn in turns) and not any(roles):
        return 'turns with "role" in a file where others have "from": only "from" is read'
    if not any(role in _ROLES for role in roles):
        return f"no turn of {', '.join(_ROLES)}, but of {', '.join(sorted(map(str, {*roles})))}"
    return ""


# -- inside ------------------------------------------------------------------------------------


class _NotRows(Exception):
    """A file of a form that is left to ``datasets``."""


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows with their place in the file.

    Raises:
        ExtractError: a line that is no JSON.
    """
    with path.open("rb") as lines:
        begun = lines.read(1 << 12).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if begun == b"[":
            yield from _items(path)
            return
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text.strip())
            except ValueError as error:
                if number == 1 and begun == b"{" and _is_whole(path):
                    raise _NotRows from None
                raise ExtractError(
                    f"{path}, line {number}: {_not_json(error)}; {_WANTED}, in one line."
                ) from error
            yield f"line {number}", row


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    if path.stat().st_size > _WHOLE:
        raise _NotRows
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ExtractError(f"{path}{line}: {_not_json(error)}.") from error
    for number, row in enumerate(whole, 1):
        yield f"item {number}", row


def _is_whole(path: Path) -> bool:
    """Whether the file is one object, over several lines."""
    if path.stat().st_size > _WHOLE:
        return True  # not known
    try:
        json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return False
    return True


def _not_json(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg}, column {error.colno})"
    return f"not UTF-8 ({error})"


def _fault(row: Any) -> str:
    """What keeps a row from being a conversation; empty if it is one, or merely unused."""
    if not isinstance(row, dict):
        return f"{_kind(row)}, not an object; {_WANTED}"
    if "conversations" not in row:
        keys = ", ".join(f'"{key}"' for key in list(row)[:5]) or "no keys"
        if "messages" in row:
            return (
                'the conversation is under "messages", and speculators reads "conversations": '
                "rename that key (turns with role and content may stay as they are)"
            )
        return f'no "conversations" in it, but {keys}; {_WANTED}'
    turns = row["conversations"]
    if turns is None:
        return ""
    if not isinstance(turns, list):
        return f'"conversations" is {_kind(turns)}, not a list; {_WANTED}'
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            return f"turn {number} is {_kind(turn)}, not an object; {_WANTED}"
        for key in ("value", "content"):
            if not isinstance(turn.get(key, ""), (str, type(None))):
                return f'turn {number}: "{key}" is {_kind(turn[key])}, not text'
    return ""


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")
