"""``AutoConfig``: how many layers a model has, also where its config says it in other words."""

from __future__ import annotations

import logging
from typing import Any

from ..record import Patch, Symbol, at
from ..stand_in import StandIn

log = logging.getLogger("vllm_compat")


class _ReadByVllm(StandIn):
    """Stands in for ``transformers.AutoConfig`` inside the generator's module.

    The generator wants ``num_hidden_layers`` of the config or of its ``text_config``, and
    nothing else of it. Where it would find none, vLLM is asked, which reads the same file for
    the model.
    """

    def from_pretrained(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            config = self._original.from_pretrained(path, *args, **kwargs)
        # transformers doesn't know the model type, which vLLM may.
        except (KeyError, ValueError) as error:
            text = _text_config_of_vllm(path)
            if text is None:
                raise
            log.info("vllm-compat: the config of %s was read by vLLM: %s", path, error)
            return text
        if _says_layers(config) or _says_layers(getattr(config, "text_config", None)):
            return config
        text = _text_config_of_vllm(path)
        return config if text is None else text


def _says_layers(config: Any) -> bool:
    return isinstance(getattr(config, "num_hidden_layers", None), int)


def _text_config_of_vllm(path: Any) -> Any | None:
    """The config of the language model as vLLM reads it; None where it has no layers either."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    try:
        text = get_hf_text_config(get_config(path, trust_remote_code=True))
    except Exception as error:
        # The generator's own error says it better, or vLLM will when it is asked to load it.
        log.debug("vllm-compat: vLLM can't read the config of %s: %s", path, error)
        return None
    return text if _says_layers(text) else None


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
        replaces={at("AutoConfig"): _ReadByVllm},
        relies_on=(
            Symbol("vllm.transformers_utils.config:get_config"),
            Symbol("vllm.transformers_utils.config:get_hf_text_config"),
        ),
    ),
)
