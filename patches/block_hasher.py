"""Prefix-cache hashes: right where caching is on, and never read.

``engine-args`` switches prefix caching off, so these two are the second lock on the door: a
user who skips that patch, or a vLLM that forces caching on, still gets every row.
"""

from __future__ import annotations

from typing import Any

from ..record import Patch, Symbol, at
from ..session import Session

_UTILS = "vllm.v1.core.kv_cache_utils"
_SAMPLING = "vllm.sampling_params:SamplingParams.skip_reading_prefix_cache"


def hash_blocks(session: Session, request: dict[str, Any]) -> None:
    """Adds to a request's arguments what prefix caching needs, if it is on.

    Args:
        session: of the generator that makes the request.
        request: keyword arguments of ``vllm.v1.request.Request``.
    """
    if session.vllm_config.cache_config.enable_prefix_caching:
        # Cached tokens are not computed, and what isn't computed can't be captured.
        request["sampling_params"].skip_reading_prefix_cache = True
        if request.get("block_hasher") is None:
            request["block_hasher"] = _hasher(session)


def _hasher(session: Session) -> Any:
    """The hasher that vLLM's engine core would give its requests."""
    if session.block_hasher is None:
        from vllm.v1.core import kv_cache_utils

        try:
            from vllm.utils.hashing import get_hash_fn_by_name
        except ImportError:  # vLLM 0.11.0
            from vllm.utils import get_hash_fn_by_name

        function = get_hash_fn_by_name(
            session.vllm_config.cache_config.prefix_caching_hash_algo
        )
        once_none_hash(kv_cache_utils.init_none_hash)(function)
        plan = session.kv_cache
        assert plan is not None, "a request before the KV cache was planned"
        session.block_hasher = kv_cache_utils.get_request_block_hasher(
            plan.hash_block_size or plan.block_size, function
        )
    return session.block_hasher


def once_none_hash(original: Any) -> Any:
    """``init_none_hash``, but not over the value of another engine in this process."""

    def init_none_hash(hash_fn: Any) -> None:
        from vllm.v1.core import kv_cache_utils

        if not hasattr(kv_cache_utils, "NONE_HASH"):
            original(hash_fn)

    return init_none_hash


PATCHES = (
    Patch(
        name="block-hasher",
        why=(
            "with prefix caching on, a request without block_hasher fails an assertion in "
            "the block pool, and one with it is cut short by a cache hit"
        ),
        upstream="vllm/v1/request.py, block_hasher; v1/core/block_pool.py",
        delete_when="speculators 0.3.0 is no longer supported",
        needed=lambda look: not look.generator_says("block_hasher="),
        speculators="<0.4",
        feature="request_block_hasher",
        relies_on=(
            Symbol("vllm.v1.request:Request", ("block_hasher",)),
            Symbol(f"{_UTILS}:get_request_block_hasher", if_gone="requests get no hashes"),
            Symbol(_SAMPLING, if_gone="a cache hit cuts rows off", since=">=0.11.1"),
        ),
    ),
    Patch(
        name="none-hash",
        why=(
            "the generator initialises NONE_HASH, a global of vLLM, and so changes the "
            "prefix hashes of any other engine in the process"
        ),
        upstream="vllm/v1/core/kv_cache_utils.py, init_none_hash",
        delete_when="speculators 0.4.x is no longer supported",
        needed=lambda look: look.generator_says("init_none_hash(caching_hash_fn)"),
        speculators=">=0.4",
        replaces={at("init_none_hash"): once_none_hash},
        relies_on=(Symbol(f"{_UTILS}:init_none_hash", ("hash_fn",)),),
    ),
)
