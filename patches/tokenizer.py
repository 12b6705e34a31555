"""``AutoTokenizer``: trusts a checkpoint's code as the generator trusts it for the model."""

from __future__ import annotations

import logging
from typing import Any

from ..record import Patch, at
from ..stand_in import StandIn

log = logging.getLogger("vllm_compat")


class _Trusting(StandIn):
    """Stands in for ``transformers.AutoTokenizer`` inside the generator's module."""

    def from_pretrained(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("trust_remote_code", True)
        tokenizer = self._original.from_pretrained(path, *args, **kwargs)
        if type(tokenizer).__module__.startswith("transformers_modules"):
            log.info("vllm-compat: the tokenizer of %s runs the checkpoint's own code.", path)
        return tokenizer


PATCHES = (
    Patch(
        name="tokenizer-remote-code",
        why=(
            "the generator trusts remote code for the model and its config but not for the "
            "tokenizer, so that Kimi's asks on stdin and then fails"
        ),
        upstream="speculators 0.3.0 to 0.4.0.1, AutoTokenizer.from_pretrained(model_path)",
        delete_when="speculators passes trust_remote_code to its tokenizer",
        needed=lambda look: look.generator_says("AutoTokenizer.from_pretrained(model_path)"),
        replaces={at("AutoTokenizer"): _Trusting},
    ),
)
