"""Cleans the blocks of the KV cache before another request uses them.

vLLM hands a block on as the last request left it. For attention that is harmless: positions
past a request's own are masked. Two things are not masked:

- **Recurrent states** (``MambaSpec`` groups: Mamba, gated delta nets, short convolutions). The
  kernels for a prefill start from zero where a request begins. The kernels for a decode step
  start from what the block holds, and many releases run a prompt of one token as a decode step:
  Mamba's up to 0.18, gated delta nets up to 0.30, linear attention still in 0.32
  (``split_decodes_and_prefills`` in vllm/v1/attention/backends). Its states are then those of
  another prompt, without an error. A CUDA kernel or a release that nobody has tried may do the
  same with other prompts. So the states of a request that begins are set to zero here.
- **NaN**. A masked position has the weight 0, and 0 * NaN is NaN in an attention kernel: a
  request with a non-finite row would spoil those that get its blocks. In models with several
  groups, layers of different kinds take turns in the same memory, and a float32 state is read
  as bfloat16 keys, some of them NaN. vLLM cleans those on a GPU only (``KVBlockZeroer`` in
  vllm/v1/worker/utils.py, from 0.17 or 0.18 on). So blocks are set to zero when they are handed
  out, if there are several groups, and after a batch that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedModelError

__all__ = ["Blocks"]


class Blocks:
    """The blocks of one worker's KV cache.

    Args:
        config: vLLM's ``KVCacheConfig`` of this worker (``model_runner.kv_cache_config`` in
            both runners, vLLM 0.11 to 0.32).
        layers: vLLM's layers by name (``static_forward_context``), with their ``kv_cache``
            bound.

    Raises:
        UnsupportedModelError: a layer keeps recurrent states in a form that isn't known.
    """

    def __init__(self, config: Any, layers: dict[str, Any]) -> None:
        self._groups = [
            _Group(group, config.num_blocks, layers) for group in config.kv_cache_groups
        ]
        self._used: list[set[int]] = [set() for _ in self._groups]
        self._over = False

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a state from token to token, beside attention."""
        return any(group.recurrent for group in self._groups)

    def begin(self, scheduler_output: Any, last: bool) -> None:
        """Before the step: cleans what requests get in it. On the current stream.

        Prefix caching is never read from (patches ``engine-args``, ``block-hasher``), so the
        blocks of a request that isn't at its beginning are new ones, to be appended.

        Args:
            scheduler_output: of vLLM's scheduler.
            last: no step of this batch follows.
        """
        if self._over:
            self._used = [set() for _ in self._groups]
        self._over = last
        dirty: list[set[int]] = [set() for _ in self._groups]
        for start, blocks in _handed_out(scheduler_output):
            for index, ids in enumerate(blocks):
                self._used[index].update(ids)
                if self._groups[index].recurrent:
                    # A later block of the same request takes over the state of an earlier one.
                    dirty[index].update(ids if start == 0 else ())
                elif len(self._groups) > 1:
                    dirty[index].update(ids)
        for group, ids in zip(self._groups, dirty, strict=True):
            group.clean(ids)

    def clean(self) -> None:
        """After a batch that failed: cleans all that it had, of every layer.

        A layer past the last captured one can't hold a NaN that matters later: rows are
        checked after the last captured layer, and a NaN stays in the residual stream of its
        row. (Where groups share memory, see :meth:`begin`.)
        """
        for group, ids in zip(self._groups, self._used, strict=True):
            group.clean(ids, or_all=True)
        self._used = [set() for _ in self._groups]


def _handed_out(output: Any) -> Iterator[tuple[int, Iterable[Iterable[int]]]]:
    """Of each request that gets blocks in a step: where it stands, and the blocks by group.

    A preempted request begins again at 0. It is among the cached requests (V1 runner) or the
    new ones (V2 runner), with all of its blocks.
    """
    for request in output.scheduled_new_reqs:
        yield int(request.num_computed_tokens), request.block_ids
    cached = output.scheduled_cached_reqs
    for start, blocks in zip(cached.num_computed_tokens, cached.new_block_ids, strict=True):
        if blocks is not None:
            yield int(start), blocks


@dataclass(frozen=True)
class _Cache:
    """A tensor of a layer, and where its blocks are."""

    tensor: torch.Tensor
    dim: int | None
    """The dimension that counts blocks; None if it can't be told."""
    parts: int
    """How many entries of that dimension make one of the scheduler's blocks: kernels may have
    smaller ones."""

    def clean(self, ids: torch.Tensor) -> None:
        if self.dim is None:
            self.tensor.zero_()
            return
        if self.parts > 1:
            offsets = torch.arange(self.parts, dtype=torch.int64, device=ids.device)
            ids = (ids[:, None] * self.parts + offsets).flatten()
        self.tensor.index_fill_(self.dim, ids, 0)


class _Group:
    """The layers that share a table of blocks."""

    def __init__(self, group: Any, num_blocks: int, layers: dict[str, Any]) -> None:
        from vllm.v1.kv_cache_interface import MambaSpec

        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", {})  # UniformTypeKVCacheSpecs: one a layer
        self.recurrent = False
        self._caches: list[_Cache] = []
        for name in group.layer_names:
            if name not in layers:
                continue
            tensors = list(_tensors(layers[name].kv_cache))
            if isinstance(specs.get(name, spec), MambaSpec):
                self.recurrent = True
                self._caches += _states(name, tensors, num_blocks)
            else:
                self._caches += [_cache(tensor, num_blocks) for tensor in tensors]

    def clean(self, ids: set[int], or_all: bool = False) -> None:
        """Sets blocks to zero.

        Args:
            ids: of the blocks.
            or_all: where a tensor's blocks can't be told, set all of it to zero. Nothing in
                it may be wanted any more.
        """
        caches = self._caches if or_all else [c for c in self._caches if c.dim is not None]
        if not ids or not caches:
            return
        device = caches[0].tensor.device
        index = torch.tensor(sorted(ids), dtype=torch.int64, device="cpu")
        if device.type == "cuda":
            # From ordinary memory torch would wait for the step that is still computing.
            index = index.pin_memory().to(device, non_blocking=True)
        with torch.inference_mode():
            for cache in caches:
                cache.clean(index)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Of a layer's ``kv_cache``: a tensor; several, of a recurrent layer; or a list of either
    with one entry for each "virtual engine" (up to 0.16 and later)."""
    if isinstance(value, torch.Tensor):
        if value.numel():
            yield _writable(value)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    # No kernel sets float8 to a value.
    eight_bits = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if eight_bits else tensor


def _states(name: str, tensors: list[torch.Tensor], num_blocks: int) -> Iterator[_Cache]:
    """vLLM makes them [blocks, ...], from 0.11 to 0.32: ``_reshape_kv_cache_tensors``."""
    if not tensors or any(len(tensor) != num_blocks for tensor in tensors):
        raise UnsupportedModelError(
            f"vllm-compat does not know how {name} keeps its recurrent states: "
            f"{[tuple(tensor.shape) for tensor in tensors]} for {num_blocks} blocks. They have "
            "to be cleared when a sequence begins."
        )
    for tensor in tensors:
        yield _Cache(tensor, 0, 1)


def _cache(tensor: torch.Tensor, num_blocks: int) -> _Cache:
    """Of an attention layer: [blocks, ...], or [2, blocks, ...] with keys and values apart.

    So all backends have it, whatever the order in memory (``get_kv_cache_shape``; from 0.29
    on [blocks, heads, tokens, content]). A block of the scheduler may be several of a kernel.
    """
    for dim, size in enumerate(tensor.shape[:2]):
        if num_blocks > 2 and size and size % num_blocks == 0:
            return _Cache(tensor, dim, size // num_blocks)
    return _Cache(tensor, None, 1)
