"""vLLM 0.11.0 beside speculators 0.4.x: a module that it doesn't have yet."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator

from ..record import Patch, Symbol

_MODULE = "vllm.utils.hashing"


@contextlib.contextmanager
def _hashing_module() -> Iterator[None]:
    if _MODULE in sys.modules or importlib.util.find_spec(_MODULE) is not None:
        yield
        return
    from vllm.utils import get_hash_fn_by_name

    stand_in = types.ModuleType(_MODULE)
    stand_in.get_hash_fn_by_name = get_hash_fn_by_name  # type: ignore[attr-defined]
    sys.modules[_MODULE] = stand_in
    try:
        yield
    finally:
        # Nobody else shall find a module there that vLLM doesn't have.
        if sys.modules.get(_MODULE) is stand_in:
            del sys.modules[_MODULE]


PATCHES = (
    Patch(
        name="hashing-module",
        why="No module named 'vllm.utils.hashing' when speculators 0.4.x is imported",
        upstream="vllm/utils/hashing.py (0.11.1); speculators 0.4.0, generator's imports",
        delete_when="vLLM 0.11.0 is no longer supported",
        needed=lambda look: (
            look.generator_says(f"from {_MODULE} import") and not look.has(_MODULE)
        ),
        vllm="<0.11.1",
        speculators=">=0.4",
        around_import={"speculators.data_generation": _hashing_module},
        provides=(f"{_MODULE}:get_hash_fn_by_name",),
        relies_on=(Symbol("vllm.utils:get_hash_fn_by_name"),),
    ),
)
