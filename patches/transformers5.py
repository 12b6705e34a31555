"""transformers 5 (needed by vLLM 0.24 and later): what speculators' import trips over.

The aids are there only while speculators is being imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from ..record import Look, Patch

_MASKS = "transformers.modeling_attn_mask_utils"
_CONFIGURATION = "transformers.configuration_utils"


def _attn_mask_module_gone(look: Look) -> bool:
    return look.sources.root("transformers") is not None and not look.has(_MASKS)


def _torch_only_for_type_checkers(look: Look) -> bool:
    # A field of the class; as a parameter (transformers before 5.4) pydantic ignores it.
    return look.sources.matches(
        _CONFIGURATION, r"^    dtype: .*torch\.dtype"
    ) and not look.sources.matches(_CONFIGURATION, r"^import torch")


@contextlib.contextmanager
def _masks_stub() -> Iterator[None]:
    if _MASKS in sys.modules or importlib.util.find_spec(_MASKS) is not None:
        yield
        return
    stub = types.ModuleType(_MASKS)

    def _prepare_4d_causal_attention_mask(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"speculators' EAGLE-1 model needs transformers < 5.24, which still has {_MASKS}."
        )

    stub._prepare_4d_causal_attention_mask = (  # type: ignore[attr-defined]
        _prepare_4d_causal_attention_mask
    )
    sys.modules[_MASKS] = stub
    try:
        yield
    finally:
        sys.modules.pop(_MASKS, None)


@contextlib.contextmanager
def _torch_named() -> Iterator[None]:
    import torch
    from transformers import configuration_utils

    if hasattr(configuration_utils, "torch"):
        yield
        return
    configuration_utils.torch = torch
    try:
        yield
    finally:
        del configuration_utils.torch


PATCHES = (
    Patch(
        name="transformers-attn-mask",
        why="No module named 'transformers.modeling_attn_mask_utils'",
        upstream="transformers 5.24; speculators/models/eagle.py",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=_attn_mask_module_gone,
        transformers=">=5.24",
        around_import={"speculators": _masks_stub},
    ),
    Patch(
        name="transformers-torch-name",
        why="PydanticUndefinedAnnotation: name 'torch' is not defined",
        upstream="transformers 5.4, configuration_utils.py; speculators/config.py",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=_torch_only_for_type_checkers,
        transformers=">=5.4",
        around_import={"speculators": _torch_named},
    ),
)
