"""vLLM 0.12 and 0.13 on a CPU: a kernel that misreads its input."""

from __future__ import annotations

from ..record import Patch, Symbol

_CUSTOM_OP = "vllm.model_executor.custom_op"


PATCHES = (
    Patch(
        name="cpu-strided-norms",
        why=(
            "on a CPU the RMS norm kernel misreads inputs with gaps, and the norms of queries "
            "and keys get such: the states of Qwen3 and its like are wrong, and vLLM's own "
            "answers too (nothing is done on a GPU)"
        ),
        upstream="vllm/_custom_ops.py, rms_norm; custom_op.py, forward_cpu (0.12, 0.13)",
        delete_when="vLLM 0.13 is no longer supported",
        # 0.11 makes its input contiguous; from 0.14 on a CPU doesn't use the kernel.
        needed=lambda look: (
            look.sources.says(_CUSTOM_OP, "CPU ops are compatible with CUDA ops")
            and not look.sources.says("vllm._custom_ops", "input_contiguous = input")
        ),
        vllm=">=0.12,<0.14",
        side="worker",
        feature="contiguous_norms",
        relies_on=(Symbol("vllm._custom_ops:rms_norm", ("out", "input", "weight", "epsilon")),),
    ),
)
