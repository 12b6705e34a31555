"""vLLM's V2 model runner: rows in its order, and its step ended as it must be.

The V2 runner needs Triton and so a GPU (default for Qwen3 from vLLM 0.22, for nearly all models
from 0.30). What stands in for it here has what capture reads of it, as the recorded releases
have it (`tests/drift/upstream.json`): no `input_batch`, a `prepare_inputs` that returns the
batch, sorted by the number of scheduled tokens, and computed tokens that are counted in
`sample_tokens` and nowhere else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_compat import UnsupportedModelError  # noqa: E402
from vllm_compat.worker.extension import _batch_order, _settle, _State  # noqa: E402


class V2Runner:
    """Stands in for vllm.v1.worker.gpu.model_runner.GPUModelRunner."""

    def __init__(self) -> None:
        self.computed: dict[str, int] = {}
        self.execute_model_state: Any = None
        self.positions: list[tuple[str, int]] = []
        self.forward: Any = None

    def prepare_inputs(self, scheduler_output: Any, *_: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        return SimpleNamespace(req_ids=sorted(counts, key=counts.get))

    def execute_model(self, scheduler_output: Any) -> None:
        batch = self.prepare_inputs(scheduler_output, object())
        for request in batch.req_ids:
            start = self.computed.setdefault(request, 0)
            count = scheduler_output.num_scheduled_tokens[request]
            self.positions += [(request, start + i) for i in range(count)]
        self.execute_model_state = (batch, scheduler_output)
        if self.forward is not None:
            self.forward()

    def sample_tokens(self, grammar_output: Any) -> None:
        assert grammar_output is None
        _, scheduler_output = self.execute_model_state
        self.execute_model_state = None
        for request, count in scheduler_output.num_scheduled_tokens.items():
            self.computed[request] += count


def output(new: dict[str, int], cached: dict[str, tuple[int, int]] | None = None) -> Any:
    """A SchedulerOutput: new request -> tokens; running request -> (computed, tokens)."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=r, num_computed_tokens=0) for r in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
        num_scheduled_tokens={**{r: n for r, (_, n) in cached.items()}, **new},
    )


def capturing(runner: Any) -> tuple[_State, list[Any]]:
    """A worker's state on that runner; what each forward's rows are goes into the list."""
    state = _State("Model", "model.layers", "torch.bfloat16", _batch_order(runner))
    seen: list[Any] = []
    runner.forward = lambda: seen.extend(state.segments())
    return state, seen


def step(state: _State, runner: Any, scheduled: Any) -> None:
    state.scheduler_output = scheduled
    runner.execute_model(scheduled)
    _settle(runner)


def test_rows_are_in_the_order_of_the_batch_that_ran() -> None:
    runner = V2Runner()
    state, seen = capturing(runner)
    step(state, runner, output({"a": 5, "b": 2, "c": 9}))
    assert [(s.request_id, s.start, s.count) for s in seen] == [
        ("b", 0, 2), ("a", 0, 5), ("c", 0, 9),
    ]  # fmt: skip


def test_a_prompt_in_chunks_goes_on_where_it_was() -> None:
    """Dropping the state, as the V1 runner's is, would compute position 0 again and again."""
    runner = V2Runner()
    state, seen = capturing(runner)
    step(state, runner, output({"a": 4}))
    step(state, runner, output({"b": 2}, {"a": (4, 4)}))
    step(state, runner, output({}, {"a": (8, 1)}))
    of_a = [position for request, position in runner.positions if request == "a"]
    assert of_a == list(range(9))
    claimed = [(s.request_id, s.start + i) for s in seen for i in range(s.count)]
    assert claimed == runner.positions


def test_a_v1_runner_never_samples() -> None:
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=["x"]),
        execute_model_state=object(),
        kv_connector_output=object(),
        sample_tokens=lambda _: pytest.fail("a token was sampled"),
    )
    _settle(runner)
    assert runner.execute_model_state is None
    assert runner.kv_connector_output is None
    assert _batch_order(runner)() == ["x"]


def test_a_batch_that_was_not_scheduled_is_an_error() -> None:
    runner = V2Runner()
    state, _ = capturing(runner)
    runner.prepare_inputs(output({"a": 1, "z": 2}))
    state.scheduler_output = output({"a": 1})
    with pytest.raises(RuntimeError, match="not what was scheduled"):
        state.segments()


def test_an_unknown_runner_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="does not know the batch"):
        _batch_order(SimpleNamespace())
