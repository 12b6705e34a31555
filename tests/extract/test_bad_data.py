"""What a user can put right is told in one sentence, and the cheap part of it at once.

The command itself, on real files, up to where a generator would be made.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_compat.cli import main
from vllm_compat.extract import ExtractError
from vllm_compat.extract.replica import Replica
from vllm_compat.extract.rows import check_beginning, fault_in, reason_unused
from vllm_compat.extract.samples import Samples, prepare

from .support import Command


def talk(*texts: str, first: str = "human") -> dict[str, Any]:
    roles = ("human", "gpt") if first == "human" else ("gpt", "human")
    turns = [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"conversations": turns}


GOOD = talk("a question", "an answer")
MESSAGES = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
}


def lines(*rows: Any) -> str:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)


# Contents of the file, and what is said of it.
DATA: dict[str, tuple[str, str]] = {
    "messages": (
        lines(MESSAGES, MESSAGES),
        r'chats\.jsonl, line 1: the conversation is under "messages", and speculators reads '
        r'"conversations"',
    ),
    "other keys": (
        lines({"prompt": "a", "answer": "b"}),
        r'chats\.jsonl, line 1: no "conversations" in it, but "prompt", "answer"; wanted is',
    ),
    "a broken line in the middle": (
        lines(*[GOOD] * 300, '{"conversations": [', *[GOOD] * 300),
        r"chats\.jsonl, line 301: not JSON \(.*column 20\); wanted is",
    ),
    "a turn that is text": (
        lines(GOOD, {"conversations": ["hello"]}),
        r"chats\.jsonl, line 2: turn 1 is text, not an object; wanted is",
    ),
    "not JSON at all": ("hello\n", r"chats\.jsonl, line 1: not JSON"),
    "text in a list": ("[\n1,\n]", r"chats\.jsonl, line 3: not JSON"),
    "empty": ("", r"chats\.jsonl is empty: wanted is"),
    "blank lines": ("\n\n", r"chats\.jsonl is empty: wanted is"),
    "no conversation in it": (
        lines({"conversations": []}, {"conversations": []}),
        r"left none of the 2 samples of .*chats\.jsonl: line 1: no conversation",
    ),
    "roles that nobody knows": (
        lines({"conversations": [{"from": "bot", "value": "a"}]}),
        r"left none .*: line 1: no turn of human, .*, but of bot",
    ),
    "nothing to learn": (
        lines(talk("only a question"), talk("another")),
        r"No token of .*chats\.jsonl would be trained on: the loss masks of all 2 samples",
    ),
}


def failed(capfd: pytest.CaptureFixture[str], words: list[str], status: int = 1) -> str:
    """The sentence that a command ends with."""
    try:
        assert main(words) == status
    except SystemExit as ended:
        assert ended.code == status  # noqa: PT017
    told = capfd.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("vllm-compat extract: "), told
    assert "unexpected" not in told
    return told


@pytest.fixture
def words(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command for a file that the test writes, chats.jsonl."""

    def never(*_: Any) -> None:
        raise AssertionError("that far it must not come")

    monkeypatch.setattr(Replica, "start", never)
    (tmp_path / "chats.jsonl").write_text(lines(GOOD))
    return command.arguments(tmp_path / "states", "--data", tmp_path / "chats.jsonl")


@pytest.mark.parametrize("fault", DATA)
def test_data(
    words: list[str], tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content, sentence = DATA[fault]
    (tmp_path / "chats.jsonl").write_text(content)
    assert re.search(sentence, failed(capfd, words))
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"conversations": "text"}, '"conversations" is text, not a list; wanted is {'),
        ([GOOD], "a list, not an object; wanted is {"),
        (
            {"conversations": [{"from": "human", "value": 3}]},
            'turn 1: "value" is a number, not text.',
        ),
        (
            {"conversations": [*GOOD["conversations"], {"role": "user", "content": ["a"]}]},
            'turn 3: "content" is a list, not text.',
        ),
        (MESSAGES, 'the conversation is under "messages"'),
    ],
)
@pytest.mark.parametrize("form", ["lines", "a list"])
def test_the_row_that_could_not_be_read(
    tmp_path: Path, row: Any, sentence: str, form: str
) -> None:
    """`datasets` up to 4.6 refuses a column of several types, from 5.0 on it takes some."""
    data = tmp_path / "chats.json"
    if form == "lines":
        data.write_text(lines(GOOD, "", GOOD, row, GOOD))
        where = "line 4"
    else:
        data.write_text(json.dumps([GOOD, GOOD, row, GOOD], indent=1))
        where = "item 3"
    assert fault_in(str(data)).startswith(f"{data}, {where}: {sentence}")
    data.write_text(lines(GOOD, {"conversations": None}, {"conversations": []}))
    assert fault_in(str(data)) == ""


def test_forms_that_datasets_reads_are_left_to_it(tmp_path: Path) -> None:
    data = tmp_path / "chats.json"
    for content in (
        json.dumps({"conversations": [GOOD["conversations"]]}, indent=1),
        json.dumps([GOOD], indent=1),
        "\ufeff" + lines(GOOD),
        lines("", GOOD),
    ):
        data.write_text(content)
        check_beginning(str(data))
        assert fault_in(str(data)) == ""


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (_without_tokenizer, r"model has no tokenizer \(tokenizer\.json"),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{") and None,
        r"The tokenizer of .*model can't be loaded: ",
    ),
    "no chat template": (_without_template, r"The tokenizer of .*model has no chat template"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"model is no checkpoint: it has no config\.json",
    ),
}


@pytest.mark.parametrize("fault", MODELS)
def test_models(
    words: list[str],
    command: Command,
    tmp_path: Path,
    fault: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    change, sentence = MODELS[fault]
    shutil.copytree(command.checkpoint, tmp_path / "model")
    change(tmp_path / "model")
    words[words.index("--model") + 1] = str(tmp_path / "model")
    assert re.search(sentence, failed(capfd, words))


def test_a_package_that_is_missing(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert "the package datasets is missing in this environment" in failed(capfd, words)


# Options, and what is said of them before anything is loaded.
CHEAP: dict[str, tuple[list[str], int, str]] = {
    "layers": (["--layers", "3", "99"], 1, "--layers 99: the layers of .* are 0 to 6"),
    "no such folder": (["--model", "/no/such"], 1, "There is no folder /no/such"),
    "no such name": (
        ["--model", "nobody/no-such-model"],
        1,
        "neither a folder nor a model that can be had from the hub: it isn't in the cache",
    ),
    "not even a name": (["--model", "no such model"], 1, "neither a folder nor a model"),
    "no such file": (["--data", "none.jsonl"], 1, r"There is no file none\.jsonl"),
    "data of another kind": (
        ["--data", "/etc/passwd"],
        1,
        r"ends in \.jsonl or \.json is wanted",
    ),
    "messages": (["--data", "MESSAGES"], 1, 'line 1: .*"messages"'),
    "output is in a file": (["--output", "FILE/states"], 1, "FILE is a file, not a folder"),
    "output is a file": (["--output", "FILE"], 1, "FILE is a file, not a folder"),
    "files of another program": (["--output", "OTHER"], 1, "another program wrote them"),
    "other layers": (["--output", "BEGUN"], 1, r"layer_ids \[1\] there, \[5, 1, 6\] now"),
    "shard": (["--shard", "3/3"], 2, "the first of 3 is 0/3"),
    "shard and start": (["--shard", "0/3", "--start", "1"], 2, "can't be given together"),
    "end before start": (["--start", "5", "--end", "3"], 2, "no sample between"),
    "replicas": (["--replicas", "0"], 2, "argument --replicas: 0: at least 1 is needed"),
    "layers below 0": (["--layers", "-1"], 2, "argument --layers/--layer-ids: -1: at least 0"),
    "max samples": (["--max-samples", "0"], 2, "0: at least 1 is needed"),
    "memory": (["--gpu-memory-utilization", "80"], 2, "80 is not a part of 1"),
    "workers": (["--preprocessing-workers", "-3"], 2, "-3: at least 1 is needed"),
}

_ALL = """
import io, json, sys
from contextlib import redirect_stderr
from vllm_compat.cli import main
for name, words in json.load(sys.stdin).items():
    with redirect_stderr(io.StringIO()) as told:
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    heavy = sorted({"torch", "vllm", "transformers", "datasets"} & set(sys.modules))
    print(json.dumps([name, status, told.getvalue(), heavy]))
"""


def test_what_is_cheap_to_tell_comes_first(command: Command, tmp_path: Path) -> None:
    """In one process, which has not loaded torch at the end."""
    (tmp_path / "MESSAGES.jsonl").write_text(lines(MESSAGES))
    (tmp_path / "FILE").write_text("")
    for folder in ("OTHER", "BEGUN"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data_0.pt").write_bytes(b"")
    manifest = {"format": 1, "settings": {"layer_ids": [1], "seq_length": 1024}}
    (tmp_path / "BEGUN" / "manifest.json").write_text(json.dumps(manifest))

    def at(word: str) -> str:
        if word.startswith(("FILE", "OTHER", "BEGUN")):
            return str(tmp_path / word)
        return str(tmp_path / "MESSAGES.jsonl") if word == "MESSAGES" else word

    given = {}
    for name, (options, *_) in CHEAP.items():
        output = ["--output", str(tmp_path / "states")]
        # The last one of an option counts; `--output` is there twice or more.
        given[name] = [
            *command.arguments(tmp_path / "states"), *output, *map(at, options),
        ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _ALL],
        input=json.dumps(given), capture_output=True, text=True, check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"},
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [name for name, *_ in told] == list(CHEAP)
    for name, status, text, heavy in told:
        _, expected, sentence = CHEAP[name]
        assert re.search(sentence, " ".join(text.split())), (name, text)
        assert (status, heavy) == (expected, []), (name, text)
        assert "unexpected" not in text
    assert not (tmp_path / "states").exists()


def test_a_part_without_a_batch_is_done(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A task of an array that is larger than the data."""
    assert main([*words, "--shard", "0/3"]) == 0
    out = capfd.readouterr()
    assert "note: this part has no batch: 1 samples are 1 batches of 4" in out.err
    assert "0 of 0 samples" in out.out


def test_a_disk_that_is_too_small(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """More than any disk has: as if 2**58 bytes were missing from it."""
    import vllm_compat.extract.run as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "row_bytes", lambda *_: 1 << 58)
        told = failed(capfd, words)
        main([*words, "--ignore-free-space"])
    assert "that far it must not come" in capfd.readouterr().err
    assert re.search(r"states: [\d.]+ TB are still to be written, and the disk has", told)


def test_rows_that_speculators_can_not_use_are_counted_and_named(
    command: Command, tmp_path: Path
) -> None:
    """Among them one that the chat template refuses: it wants an assistant's turn last."""
    passed_over = Version(version("speculators")) < Version("0.4.0")  # else it fails of it
    folder = shutil.copytree(command.checkpoint, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% if messages[-1].role != 'assistant' %}{{ raise_exception('no reply') }}{% endif %}"
        + template.read_text()
    )
    data = tmp_path / "chats.jsonl"
    data.write_text(
        lines(
            GOOD,
            {"conversations": None},
            talk("a", "b"),
            "",
            talk("no reply to this"),
            {"conversations": [{"from": "bot", "value": "a"}]},
            talk("c", "d"),
        )
    )

    def prepared() -> Samples:
        return prepare(
            str(folder), str(data), seq_length=64, workers=1, cache_dir=str(tmp_path / "cache")
        )

    if not passed_over:
        with pytest.raises(ExtractError, match=r"chats\.jsonl: line 5: no reply"):
            prepared()
        return
    samples = prepared()
    assert len(samples) == 3
    assert samples.unused == 3
    first, second, third = samples.unused_names
    assert first == "line 2: no conversation"
    assert second.startswith("line 5: ")
    assert "no reply" in second
    assert third.startswith("line 6: no turn of human")


def test_of_a_choice_of_rows_only_those_are_named(command: Command, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(lines(*[talk(f"{i}", "b") if i % 2 else {"conversations": []}
                            for i in range(40)]))  # fmt: skip
    samples = prepare(
        str(command.checkpoint), str(data), seq_length=64, max_samples=10, workers=1,
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    assert len(samples) + samples.unused == 10
    assert len(samples.unused_names) == samples.unused
    assert all(int(n.split()[1].strip(":")) % 2 for n in samples.unused_names)


def test_turns_with_role_and_content_are_taken(command: Command, tmp_path: Path) -> None:
    """By speculators; the sentence about "messages" says so."""
    prepared = []
    for name, row in (("a", {"conversations": MESSAGES["messages"]}), ("b", talk("a", "b"))):
        data = tmp_path / f"{name}.jsonl"
        data.write_text(lines(row))
        samples = prepare(
            str(command.checkpoint), str(data), seq_length=64, workers=1,
            cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        assert (len(samples), samples.unused) == (1, 0)
        prepared.append([part.tolist() for part in samples.sample(0)])
    assert prepared[0] == prepared[1]
    assert any(prepared[0][1])


def test_turns_of_two_forms_in_one_file() -> None:
    """As `datasets` up to 4.6 gives them to speculators, which reads the empty "from"."""
    turns = [{"from": None, "value": None, "role": "user", "content": "a"}]
    assert 'only "from" is read' in reason_unused(turns)
    assert reason_unused(MESSAGES["messages"]) == ""
