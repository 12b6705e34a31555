"""The versioned patches. Each is a record; :data:`REGISTRY` is the order of application."""

from __future__ import annotations

from ..record import Patch
from . import (
    block_hasher,
    cpu_norms,
    device_name,
    engine_args,
    executor,
    generator,
    hashing,
    kv_cache,
    memory,
    model_config,
    moved_names,
    request,
    results,
    scheduler,
    start_method,
    tokenizer,
    transformers5,
)

__all__ = ["REGISTRY"]

REGISTRY: tuple[Patch, ...] = (
    *start_method.PATCHES,
    *transformers5.PATCHES,
    *hashing.PATCHES,
    *moved_names.PATCHES,
    *tokenizer.PATCHES,
    *model_config.PATCHES,
    *engine_args.PATCHES,
    *executor.PATCHES,
    *cpu_norms.PATCHES,
    *memory.PATCHES,
    *device_name.PATCHES,
    *kv_cache.PATCHES,
    *scheduler.PATCHES,
    *request.PATCHES,
    *block_hasher.PATCHES,
    *results.PATCHES,
    *generator.PATCHES,
)
