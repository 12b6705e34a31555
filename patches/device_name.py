"""The name of the device in ``data_config.json``, on a machine that has none."""

from __future__ import annotations

from typing import Any

from ..record import Look, Patch

_CONFIG = "speculators.data_generation.config_generator"
_SEAM = f"{_CONFIG}:get_device_name"


def _asks_first(original: Any) -> Any:
    def get_device_name(index: int) -> str:
        import torch

        # current_accelerator() is what torch was built for, whether or not it is there.
        if not torch.accelerator.is_available():
            return "NO ACCELERATOR"
        name: str = original(index)
        return name

    return get_device_name


def _asks_whatever_is_there(look: Look) -> bool:
    return look.sources.says(_CONFIG, "device_name = get_device_name(0)")


PATCHES = (
    Patch(
        name="device-name",
        why=(
            "DataGenerationConfig.from_generator() asks CUDA for the name of its device where "
            "torch is built for CUDA and there is none: Found no NVIDIA driver on your system"
        ),
        upstream="speculators 0.4.0, utils/util.py, get_device_name",
        delete_when="speculators 0.4.x is no longer supported",
        needed=_asks_whatever_is_there,
        speculators=">=0.4",
        replaces={_SEAM: _asks_first},
        # The config is made after the last batch, by whoever writes the files.
        anywhere=(_SEAM,),
    ),
)
