"""Config of a MiniMax-M2 checkpoint: the keys of config.json as they are."""

from typing import Any, ClassVar

from transformers.configuration_utils import PretrainedConfig

BASE_KEYS = (
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)


class MiniMaxM2Config(PretrainedConfig):
    model_type = "minimax_m2"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in BASE_KEYS and name != "model_type":
                setattr(self, name, value)
        super().__init__(**{name: kwargs[name] for name in BASE_KEYS if name in kwargs})
