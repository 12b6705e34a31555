"""vLLM 0.33: names that the generator imports from where they no longer are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from ..environment import GENERATOR
from ..record import Patch, Symbol

_OLD = "vllm.v1.core.kv_cache_utils"
_NEW = "vllm.v1.core.kv_cache_planning"
_MOVED = (
    "_get_kv_cache_groups_uniform_spec",
    "get_kv_cache_config_from_groups",
    "unify_hybrid_kv_cache_specs",
)


@contextlib.contextmanager
def _old_place() -> Iterator[None]:
    """While it lasts, the generator's own import statement finds the moved names.

    A module's ``__getattr__`` (PEP 562) sees who asks. Everybody else gets the AttributeError
    that they would get without it.
    """
    from vllm.v1.core import kv_cache_planning, kv_cache_utils

    before = vars(kv_cache_utils).get("__getattr__")

    def __getattr__(name: str) -> Any:
        if name in _MOVED and sys._getframe(1).f_globals.get("__name__") == GENERATOR:
            return getattr(kv_cache_planning, name)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {_OLD!r} has no attribute {name!r}")

    kv_cache_utils.__getattr__ = __getattr__
    try:
        yield
    finally:
        if before is None:
            del kv_cache_utils.__getattr__
        else:
            kv_cache_utils.__getattr__ = before


PATCHES = (
    Patch(
        name="kv-planning-names",
        why=(
            "cannot import name '_get_kv_cache_groups_uniform_spec' from "
            "'vllm.v1.core.kv_cache_utils' when speculators is imported"
        ),
        upstream="vllm/v1/core/kv_cache_planning.py (0.33)",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: (
            look.has(_NEW) and not look.has(f"{_OLD}:get_kv_cache_config_from_groups")
        ),
        vllm=">=0.33",
        around_import={"speculators.data_generation": _old_place},
        provides=tuple(f"{_OLD}:{name}" for name in _MOVED),
        relies_on=tuple(Symbol(f"{_NEW}:{name}") for name in _MOVED),
    ),
)
