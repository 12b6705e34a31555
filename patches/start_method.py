"""The import of speculators: asks for CUDA in the way that leaves fork usable."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from ..record import Patch

_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


@contextlib.contextmanager
def _asking_nvml() -> Iterator[None]:
    if _CHECK in os.environ:
        yield
        return
    os.environ[_CHECK] = "1"
    try:
        yield
    finally:
        # vLLM sets it for good, for the same reason (vllm/env_override.py).
        if "vllm" not in sys.modules:
            os.environ.pop(_CHECK, None)


PATCHES = (
    Patch(
        name="import-without-cuda",
        why=(
            "importing speculators asks torch.cuda.is_available(), after which forked "
            "workers can't use CUDA (Cannot re-initialize CUDA in forked subprocess)"
        ),
        upstream="speculators/__init__.py imports torch._inductor; torch 2.11",
        delete_when="importing speculators no longer asks CUDA for its devices",
        needed=lambda look: True,
        around_import={"speculators": _asking_nvml},
    ),
)
