"""Config of a Kimi-K2.5 checkpoint: a text and a vision config, nothing at the top."""

from typing import Any

from transformers import DeepseekV3Config
from transformers.configuration_utils import PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"

    def __init__(self, **kwargs: Any) -> None:
        # transformers makes one without arguments to print what differs from it.
        defaults = {
            "hidden_size": 1152,
            "mm_hidden_size": 1152,
            "pos_emb_type": "divided_fixed",
            "merge_kernel_size": (2, 2),
            "video_attn_type": "spatial_temporal",
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
        }
        super().__init__(**{**defaults, **kwargs})


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"

    def __init__(
        self,
        vision_config: Any = None,
        text_config: Any = None,
        ignore_index: int = -100,
        media_placeholder_token_id: int = 163605,
        pad_token_id: int = 0,
        use_unified_vision_chunk: bool = False,
        video_placeholder: str = "<|kimi_k25_video_placeholder|>",
        **kwargs: Any,
    ) -> None:
        if not isinstance(vision_config, PretrainedConfig):
            vision_config = KimiK25VisionConfig(**(vision_config or {}))
        if not isinstance(text_config, PretrainedConfig):
            text_config = DeepseekV3Config(**(text_config or {}))
        self.vision_config = vision_config
        self.text_config = text_config
        if vision_config.mm_hidden_size == vision_config.hidden_size:
            vision_config.mm_hidden_size = text_config.hidden_size
        self.ignore_index = ignore_index
        self.media_placeholder_token_id = media_placeholder_token_id
        self.use_unified_vision_chunk = use_unified_vision_chunk
        self.video_placeholder = video_placeholder
        if getattr(text_config, "quantization_config", None) is not None:
            self.quantization_config = text_config.quantization_config
        super().__init__(pad_token_id=pad_token_id, **kwargs)

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size
