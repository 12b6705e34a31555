"""Tokenizer of a Kimi checkpoint: a class that only remote code brings."""

import json
from typing import Any, ClassVar

from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names: ClassVar = {"vocab_file": "tokenizer.json"}

    def __init__(self, vocab_file: str, **kwargs: Any) -> None:
        with open(vocab_file) as file:
            self._ids: dict[str, int] = json.load(file)["model"]["vocab"]
        self._words = {index: word for word, index in self._ids.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return text.split()

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, self._ids["<unk>"])

    def _convert_id_to_token(self, index: int) -> str:
        return self._words[index]

    def save_vocabulary(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        return ()
