"""``AutoConfig``: how many layers a model has, also where its config says it in other words."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from ..model_shape import find_shape, shape_by_vllm
from ..record import Patch, Symbol, at
from ..stand_in import StandIn

log = logging.getLogger("vllm_compat")


class _InTheUsualWords(StandIn):
    """Stands in for ``transformers.AutoConfig`` inside the generator's module.

    The generator wants ``num_hidden_layers`` of the config or of its ``text_config``, and
    nothing else of it.
    """

    def from_pretrained(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            config = self._original.from_pretrained(path, *args, **kwargs)
        # transformers doesn't know the model type, which vLLM may.
        except (KeyError, ValueError) as error:
            shape = shape_by_vllm(path)
            if shape is None:
                raise
            log.info("vllm-compat: the config of %s was read by vLLM: %s", path, error)
            return SimpleNamespace(num_hidden_layers=shape.layers)
        shape = find_shape(config) or shape_by_vllm(path)
        return config if shape is None else SimpleNamespace(num_hidden_layers=shape.layers)


PATCHES = (
    Patch(
        name="layers-in-other-words",
        why=(
            "the generator looks for num_hidden_layers in the config or its text_config and "
            "fails for ChatGLM (num_layers), InternVL (llm_config) and models whose config "
            "class is vLLM's own"
        ),
        upstream="speculators 0.3.0 to 0.4.0.1, generator __init__",
        delete_when="speculators asks vLLM's model config for the number of layers",
        needed=lambda look: look.generator_says("Cannot determine num_layers from config"),
        replaces={at("AutoConfig"): _InTheUsualWords},
        relies_on=(
            Symbol("vllm.transformers_utils.config:get_config"),
            Symbol("vllm.transformers_utils.config:get_hf_text_config"),
        ),
    ),
)
