"""``Request``: noted in the batch, and without arguments that are gone."""

from __future__ import annotations

from typing import Any

from ..record import Patch, Symbol, at
from ..session import current_session
from .block_hasher import hash_blocks

_REQUEST = "vllm.v1.request:Request"


def _noted(original: Any) -> Any:
    def Request(**kwargs: Any) -> Any:
        session = current_session()
        if session.batch is None:
            raise RuntimeError("a request outside of generate()")
        session.batch.register(kwargs["request_id"])
        if session.features.request_without_eos:
            kwargs.pop("eos_token_id", None)
        if session.features.request_block_hasher:
            hash_blocks(session, kwargs)
        return original(**kwargs)

    return Request


PATCHES = (
    Patch(
        name="request-account",
        why="each request is a sequence of the batch; rows are attributed by its id",
        upstream="speculators 0.3.0 to 0.4.0.1, generate()",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={at("Request"): _noted},
        relies_on=(
            Symbol(
                _REQUEST,
                ("request_id", "prompt_token_ids", "sampling_params", "pooling_params"),
                "requests can't be made",
            ),
        ),
    ),
    Patch(
        name="request-eos-token-id",
        why="Request() got an unexpected keyword argument 'eos_token_id'",
        upstream="vllm/v1/request.py (0.17.1)",
        delete_when="vLLM before 0.17 is no longer supported (then for good)",
        needed=lambda look: not look.accepts(_REQUEST, "eos_token_id"),
        vllm=">=0.17",
        feature="request_without_eos",
    ),
)
