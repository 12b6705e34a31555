"""How many layers a model has, how wide they are and how many token ids it knows.

Configs say it in other words (ChatGLM: ``num_layers``, ``padded_vocab_size``; MPT:
``n_layers``, ``d_model``) and in other places (InternVL: ``llm_config``; Qwen2.5-Omni:
``thinker_config``). In vLLM's text config (``ModelConfig.hf_text_config``, 0.11 to 0.32) all
have the usual names: it is what transformers' ``get_text_config`` gives, or of a config class
of vLLM's own with an ``attribute_map``. So vLLM reads ``num_hidden_layers``, ``hidden_size``
and ``vocab_size`` alone. Here is the same for a config that vLLM hasn't read. Imports neither
torch nor vLLM, unless :func:`read_shape` has to ask vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedModelError

__all__ = ["ModelShape", "default_layers", "find_shape", "read_shape", "shape_of"]

log = logging.getLogger("vllm_compat")

# Where a language model's config is inside of another one's. vLLM makes text_config of
# llm_config (_CONFIG_ATTRS_MAPPING); thinker_config has a text_config in turn.
_INSIDE = ("text_config", "llm_config", "language_config", "thinker_config")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
_WIDTH = ("hidden_size", "d_model", "n_embd", "n_embed")
_VOCABULARY = ("vocab_size", "padded_vocab_size", "n_vocab")
# In vLLM's order (ModelArchConfigConvertorBase.derive_max_model_len_and_key, 0.16.0), which
# takes the least of them.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about its states.

    Attributes:
        layers: decoder layers.
        hidden_size: width of the residual stream.
        vocabulary: token ids lie in ``range(vocabulary)``; None: the config doesn't say.
        positions: that the model was made for, without any ``rope_scaling``; None: it doesn't
            say.
    """

    layers: int
    hidden_size: int
    vocabulary: int | None
    positions: int | None


def default_layers(layers: int) -> tuple[int, ...]:
    """The layers that speculators' generator (0.3.0 to 0.4.0.1) takes when it is told none."""
    return (2, layers // 2, layers - 3, layers - 1)


def find_shape(config: Any) -> ModelShape | None:
    """The shape of the language model that a config describes; None if it doesn't say.

    Args:
        config: a config of transformers or vLLM, or what ``config.json`` holds.
    """
    for text in _inwards(config):
        layers, width = _first(text, _LAYERS), _first(text, _WIDTH)
        if layers and width:
            positions = [n for name in _POSITIONS if (n := _first(text, (name,)))]
            return ModelShape(
                layers, width, _first(text, _VOCABULARY), min(positions, default=None)
            )
    return None


def shape_of(config: Any, name: str) -> ModelShape:
    """As :func:`find_shape`.

    Args:
        config: as there.
        name: of the model, for the message.

    Raises:
        UnsupportedModelError: the config doesn't say.
    """
    shape = find_shape(config)
    if shape is None:
        raise UnsupportedModelError(
            f"{name}: its config doesn't say how many layers it has and how wide they are "
            "(num_hidden_layers and hidden_size, or any other name for them that is known)."
        )
    return shape


def read_shape(model: str) -> ModelShape:
    """The shape of a checkpoint. Loads its config and nothing else.

    Args:
        model: a folder, or a name on the hub.

    Raises:
        UnsupportedModelError: the config can't be read, or doesn't say.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    # A KeyError or ValueError: transformers doesn't know the model type, which vLLM may.
    except (OSError, KeyError, ValueError) as error:
        shape = None if isinstance(error, OSError) else shape_by_vllm(model)
        if shape is None:
            sentence = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UnsupportedModelError(
                f"can't read the config of {model}: {sentence}"
            ) from error
        return shape
    return find_shape(config) or shape_by_vllm(model) or shape_of(config, model)


def shape_by_vllm(model: Any) -> ModelShape | None:
    """The shape of a checkpoint whose config class is vLLM's own; None if vLLM has none."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    try:
        return find_shape(get_hf_text_config(get_config(model, trust_remote_code=True)))
    except Exception as error:
        # What transformers said of it says it better, or vLLM will when it loads the model.
        log.debug("vllm-compat: vLLM can't read the config of %s: %s", model, error)
        return None


def _inwards(config: Any) -> Iterator[Any]:
    """The innermost language model's config first, and those around it."""
    if config is None:
        return
    if not isinstance(config, Mapping) and hasattr(config, "get_text_config"):
        text = config.get_text_config()
        if text is not config:
            yield from _inwards(text)
    for name in _INSIDE:
        yield from _inwards(_get(config, name))
    yield config


def _get(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = _get(config, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
