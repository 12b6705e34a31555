"""Config of a Kimi-K2 checkpoint: DeepSeek-V3's under another model type."""

from transformers import DeepseekV3Config as _DeepseekV3Config


class DeepseekV3Config(_DeepseekV3Config):
    model_type = "kimi_k2"
