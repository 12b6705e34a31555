"""torch's defaults, which a user may have set for their own tensors.

``torch.set_default_device`` and ``with torch.device(...)`` hold for the thread and for whatever
it calls. In speculators' and vLLM's code they would put tensors where these don't expect them,
"meta" among them, which has no values. All tensors of this package name their device and dtype.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["on_cpu", "workers_start"]

_starting = threading.local()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """While it lasts, this thread's tensors are on the CPU unless their maker says otherwise.

    Nothing is done where nobody has set a default: a forked worker would inherit it, and pay
    for it at each call of torch's.
    """
    import torch

    with torch.device("cpu") if _something_is_set() else contextlib.nullcontext():
        yield


def _something_is_set() -> bool:
    # torch.get_default_device() answers by making a tensor: a context on the user's GPU.
    try:
        from torch._C import _len_torch_function_stack
    except ImportError:
        return True
    return bool(_len_torch_function_stack())


@contextlib.contextmanager
def workers_start() -> Iterator[None]:
    """Processes that this thread forks meanwhile have torch's own default dtype, float32.

    A spawned worker has it anyway. The default is the whole process's, so it can't be changed
    here: the user's other threads may be making tensors.
    """
    _starting.now = True
    try:
        yield
    finally:
        _starting.now = False


def _in_child() -> None:
    if getattr(_starting, "now", False):
        import torch

        torch.set_default_dtype(torch.float32)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
