"""vLLM 0.12 and 0.13 on a CPU: RMS norms of tensors that don't lie in one piece."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["contiguous_norms"]


def contiguous_norms(worker: Any) -> bool:
    """Makes the worker's RMS norm copy an input that has gaps, if its kernel needs that.

    Runs in the worker, by ``collective_rpc``. The kernel for CPUs reads such an input as if it
    had no gaps. Qwen3 and others norm queries and keys, which are parts of one tensor: their
    own outputs are wrong on these releases, and every state with them.

    Returns:
        Whether anything was replaced (in this worker process alone).
    """
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not _misreads(_custom_ops.rms_norm):
        return False
    original = _custom_ops.rms_norm

    def rms_norm(
        out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> None:
        original(out, input.contiguous(), weight, epsilon)

    _custom_ops.rms_norm = rms_norm
    return True


def _misreads(rms_norm: Any) -> bool:
    like: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    whole = torch.arange(1, 33, **like).reshape(2, 16)
    part = whole[:, :8]
    weight = torch.ones(8, **like)
    seen, right = torch.empty(2, 8, **like), torch.empty(2, 8, **like)
    rms_norm(seen, part, weight, 1e-6)
    rms_norm(right, part.contiguous(), weight, 1e-6)
    return not torch.allclose(seen, right)
