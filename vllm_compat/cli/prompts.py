"""The prompts that ``verify`` runs."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import CommandError

__all__ = ["built_in_prompts", "read_prompts"]

# Prose, code and other scripts, so that most tokenizers give some hundred different tokens.
_TEXT = """\
A lighthouse keeper writes down the weather four times a day. On the first of March the wind
came from the north-west, force six, and the barometer stood at 998 hPa. "Fog by evening," he
noted, and by evening there was fog. The ships that passed between the rocks and the sandbank
blew their horns; he counted seven of them, and one that he couldn't place.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Was man nicht messen kann, kann man schätzen, und was man schätzt, sollte man aufschreiben:
Datum, Ort, Einheit. Le lendemain, la mer était calme et le ciel presque vert. 船は七隻あった。
Кто-то из них не ответил на сигнал. The sum of the first n odd numbers is n^2: 1 + 3 + 5 + 7 =
16, and 1 + 3 + 5 + 7 + 9 = 25. Proof: a square of side n grows by 2n + 1 when its side grows
by one.

User: How do I find the last line of a file? Assistant: With `tail -n 1 FILE`. If the file is
being written to, `tail -f FILE` shows each new line as it comes; stop it with Ctrl-C.
"""

# Slices of that text: lengths of one token to all of it, around multiples of a block of 16,
# beginnings in common (a prefix cache must not shorten the second), more than ten of them
# (speculators 0.4.0 mixes up their order from the eleventh on).
_SLICES: tuple[tuple[int, int | None], ...] = (
    (0, 1), (0, 2), (7, 10), (0, 15), (3, 19), (0, 17), (20, 84), (0, 127), (5, 133),
    (0, 129), (60, 300), (0, None), (30, None), (100, 101), (0, 64),
)  # fmt: skip

_FEW = 64  # different tokens; with fewer the tokenizer can't read the text


def built_in_prompts(tokenizer: Any, vocabulary: int, longest: int) -> list[list[int]]:
    """Prompts for any model.

    Args:
        tokenizer: the model's.
        vocabulary: ids lie in ``range(vocabulary)``.
        longest: cut to so many tokens.
    """
    ids = [i for i in tokenizer(_TEXT, add_special_tokens=False)["input_ids"] if i < vocabulary]
    if len(set(ids)) < _FEW:
        source = random.Random(16)
        ids = [source.randrange(vocabulary) for _ in range(400)]
    prompts = [ids[begin:end][:longest] for begin, end in _SLICES]
    return [prompt for prompt in prompts if prompt]


def read_prompts(path: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Reads prompts from a file and makes token ids of them.

    Args:
        path: ``.jsonl`` or ``.json``: objects with ``input_ids`` (or ``prompt_token_ids``),
            with ``prompt`` or ``text``, or with ``conversations`` or ``messages``, to which
            the chat template is applied; any other file: each line is a prompt.
        tokenizer: the model's.
        longest: cut to so many tokens.

    Raises:
        CommandError: the file, with its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"can't read the prompts in {path}: {error}.") from error
    prompts = []
    for number, row in _rows(path, text):
        ids = _ids(row, tokenizer, f"{path}, prompt {number}")
        if not ids:
            raise CommandError(f"{path}, prompt {number}: it has no tokens.")
        prompts.append(ids[:longest])
    if not prompts:
        raise CommandError(f"{path} has no prompts.")
    return prompts


def _rows(path: Path, text: str) -> list[tuple[int, Any]]:
    if path.suffix not in (".json", ".jsonl"):
        return [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    try:
        if path.suffix == ".json":
            whole = json.loads(text)
            return list(enumerate(whole if isinstance(whole, list) else [whole], 1))
        lines = enumerate(text.splitlines(), 1)
        return [(n, json.loads(line)) for n, line in lines if line.strip()]
    except ValueError as error:
        raise CommandError(f"{path} is not JSON: {error}.") from error


def _ids(row: Any, tokenizer: Any, where: str) -> list[int]:
    if isinstance(row, str):
        return list(tokenizer(row)["input_ids"])
    if isinstance(row, list) and all(type(i) is int for i in row):
        return list(row)
    if isinstance(row, dict):
        for key in ("input_ids", "prompt_token_ids"):
            if key in row:
                return list(row[key])
        for key in ("prompt", "text"):
            if isinstance(row.get(key), str):
                return list(tokenizer(row[key])["input_ids"])
        for key in ("conversations", "messages"):
            if key in row:
                return _chat(row[key], tokenizer, where)
    raise CommandError(
        f"{where}: an object with input_ids, prompt, text, messages or conversations is wanted."
    )


def _chat(turns: Sequence[Any], tokenizer: Any, where: str) -> list[int]:
    roles = {"human": "user", "gpt": "assistant"}
    try:
        messages = [
            {
                "role": roles.get(role := t.get("from") or t["role"], role),
                "content": t.get("value") or t["content"],
            }
            for t in turns
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CommandError(f"{where}: no conversation for this tokenizer ({error}).") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
