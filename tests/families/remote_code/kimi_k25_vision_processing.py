"""Image processor of a Kimi-K2.5 checkpoint: vLLM loads one even for text prompts."""

from typing import Any

import torch
from transformers.image_processing_utils import BaseImageProcessor


class KimiK25VisionProcessor(BaseImageProcessor):
    def __init__(self, media_proc_cfg: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_frames_per_chunk = 4

    def media_tokens_calculator(self, media: Any) -> int:
        return 4

    def split_video_chunks(self, video: Any) -> list[Any]:
        return [video]

    def preprocess(
        self, medias: list[Any], return_tensors: str | None = None
    ) -> dict[str, Any]:
        return {
            "pixel_values": torch.zeros(16 * len(medias), 3, 14, 14),
            "grid_thws": torch.tensor([[1, 4, 4]] * len(medias)),
        }
