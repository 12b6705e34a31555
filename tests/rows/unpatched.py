"""speculators' generate() and worker extension as they are, and vLLM's own scheduler.

A stand-in for the model runner alone: its "states" say whose row they are (sequence, position).
Nothing of vllm-compat is imported. Run as a script: reads requests, writes what came out.
"""

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import speculators.data_generation.custom_worker as upstream_worker
import speculators.data_generation.vllm_hidden_states_generator as upstream
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

ONE_REPLY_IS_A_LIST = "captured_states_list[0]"


class StandIn:
    """In place of the executor and its model runner."""

    def __init__(self, layer_ids: list[int]) -> None:
        self.layer_ids = layer_ids
        self.extension = object.__new__(upstream_worker.HiddenStatesWorkerExtension)
        self.extension._layer_ids = frozenset(layer_ids)
        self.extension._reset_capture()
        self.input_batch = SimpleNamespace(req_id_to_index={})
        self.extension.model_runner = self
        self.computed: dict[str, int] = {}
        self.wraps = ONE_REPLY_IS_A_LIST in inspect.getsource(upstream)

    def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), unique_reply_rank: int | None = None
    ) -> Any:
        reply = getattr(self.extension, method)(*args)
        # As vLLM 0.11.0 does for 0.3.0, and 0.11.1 and later for 0.4.x.
        return [reply] if self.wraps or unique_reply_rank is None else reply

    def execute_model(self, scheduled: Any) -> None:
        rows = []
        counts = scheduled.num_scheduled_tokens
        self.input_batch.req_id_to_index = {r: i for i, r in enumerate(counts)}
        for request_id, count in counts.items():
            start = self.computed.get(request_id, 0)
            sequence = int(request_id.rpartition("_")[2])
            rows += [[sequence, position] for position in range(start, start + count)]
            self.computed[request_id] = start + count
        # The upstream forward keeps one tensor a layer, in ascending order.
        states = torch.tensor(rows)
        self.extension._store_captured_states([states] * len(self.extension._layer_ids))

    def sample_tokens(self, output: Any) -> None: ...

    def shutdown(self) -> None: ...


def generator(folder: str, budget: int, layer_ids: list[int]) -> Any:
    config = EngineArgs(
        model=folder,
        max_model_len=1024,
        max_num_batched_tokens=budget,
        max_num_seqs=upstream.MAX_NUM_SEQS,
        block_size=16,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 10_000
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    made = object.__new__(upstream.VllmHiddenStatesGenerator)
    made.vllm_config = config
    made.layer_ids = layer_ids
    made.tokenizer = SimpleNamespace(eos_token_id=1)
    made._request_counter = 0
    made.block_hasher = None
    made.executor = StandIn(layer_ids)
    made.scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(10_000, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    return made


def answer(made: Any, batch: list[list[int]]) -> dict[str, Any]:
    try:
        results = made.generate(batch)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "input_ids": [r["input_ids"].tolist() for r in results],
        "rows": [r["hidden_states"][0].tolist() for r in results],
        "layers": [len(r["hidden_states"]) for r in results],
    }


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        made = generator(sys.argv[1], request["budget"], request["layer_ids"])
        replies = [answer(made, batch) for batch in request["batches"]]
        assert "vllm_compat" not in sys.modules
        sys.stdout.write("\nreply " + json.dumps(replies) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
