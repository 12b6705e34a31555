"""vLLM 0.12 and 0.13 on a CPU: a kernel that misreads its input."""

from __future__ import annotations

from typing import Any

from ..record import Patch, Symbol, at
from ..session import current_session

_CUSTOM_OP = "vllm.model_executor.custom_op"


def _contiguous_norms(executor: Any) -> Any:
    class MultiprocExecutor(executor):  # type: ignore[misc]
        def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "_setup_hidden_states_capture":
                from ..worker.norms import contiguous_norms

                current_session().running_engine.rpc(contiguous_norms)
            return super().collective_rpc(method, *args, **kwargs)

    return MultiprocExecutor


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
        replaces={at("MultiprocExecutor"): _contiguous_norms},
        relies_on=(Symbol("vllm._custom_ops:rms_norm", ("out", "input", "weight", "epsilon")),),
    ),
)
