"""What the installed vLLM and speculators do, as named booleans.

Each field is what one patch record's probe found. The adapters read them with plain ifs, so
what a release gets can be read in one place. ``VLLM_COMPAT_SKIP`` with the record's name
switches a field off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Patch

__all__ = ["Features"]


@dataclass(frozen=True)
class Features:
    """Named features of one installation; each is off unless its record is on.

    Attributes:
        two_phase_step: ``execute_model`` keeps its batch until ``sample_tokens``.
        bare_reply: ``collective_rpc(unique_reply_rank=r)`` gives the reply of that rank
            itself, not a list of one.
        separate_warm_up: the executor compiles and warms up the model in a call of its own.
        kv_planning_module: KV caches are planned in ``kv_cache_planning``, from groups that
            the engine core makes first.
        kv_spec_registration: KV cache specs have to be registered before they are used.
        kv_cache_layout: the engine core resolves one KV cache layout for all workers.
        group_block_size: the block size is that of the smallest KV cache group.
        hash_block_size: prefix hashes have a block size of their own.
        cache_hit_alignment: the KV cache config carries the alignment of cache hits.
        mla_context_in_front: MLA's prefill counts the tokens that have a context from the
            front of the batch, where the V2 runner doesn't put them.
        scheduler_block_size: ``Scheduler`` requires ``block_size``.
        scheduler_without_block_size: ``Scheduler`` refuses the ``block_size`` that the
            generator passes.
        platform_block_size: the platform chooses a block size if none is named.
        request_without_eos: ``Request`` refuses ``eos_token_id``.
        request_block_hasher: the generator gives its requests no block hasher.
        results_by_offset: the generator cuts its results out of one tensor (0.3.0).
        results_by_request: the generator reads its results by request id (0.4).
        contiguous_norms: the CPU's RMS norm misreads inputs with gaps.
    """

    two_phase_step: bool = False
    bare_reply: bool = False
    separate_warm_up: bool = False
    kv_planning_module: bool = False
    kv_spec_registration: bool = False
    kv_cache_layout: bool = False
    group_block_size: bool = False
    hash_block_size: bool = False
    cache_hit_alignment: bool = False
    mla_context_in_front: bool = False
    scheduler_block_size: bool = False
    scheduler_without_block_size: bool = False
    platform_block_size: bool = False
    request_without_eos: bool = False
    request_block_hasher: bool = False
    results_by_offset: bool = False
    results_by_request: bool = False
    contiguous_norms: bool = False

    @classmethod
    def of(cls, patches: Iterable[Patch]) -> Features:
        """The features that these records, all of them on, stand for."""
        return cls(**{patch.feature: True for patch in patches if patch.feature})
