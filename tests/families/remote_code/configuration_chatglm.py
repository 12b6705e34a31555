"""Config of ChatGLM, as its repositories bring it: ``num_layers``, and no other name for it."""

from transformers import PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"
