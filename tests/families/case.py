"""One family through the real generator; run as a process of its own.

``python -m families.case FOLDER OUTPUT [TENSOR_PARALLEL_SIZE]``, where FOLDER is from
``checkpoints.make`` and OUTPUT is the file for the result, a JSON object:

* ``refused``: the sentence, if the generator refuses the model; else
* what ran (``vllm_class``, ``layers``, ``convention``, ``dtype``, ``tokenizer``, ``versions``)
  and ``errors``: for each prompt and layer the largest relative error of a row.

It imports vllm-compat and speculators as a user does, and no vLLM before them.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 1024


def run(folder: Path, tensor_parallel_size: int) -> dict[str, Any]:
    import vllm_compat

    vllm_compat.apply()
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )
    from vllm.plugins import load_general_plugins

    # The workarounds for this process, the driver; vLLM does it in its workers.
    load_general_plugins()

    saved = torch.load(folder / "reference.pt")
    prompts, reference = saved["prompts"], saved["states"]
    layer_ids = list(range(reference[0].shape[0]))
    try:
        generator = VllmHiddenStatesGenerator(
            str(folder / "model"),
            layer_ids=layer_ids,
            max_model_len=MAX_MODEL_LEN,
            tensor_parallel_size=tensor_parallel_size,
        )
    except vllm_compat.UnsupportedModelError as error:
        return {"refused": str(error), "versions": versions()}
    results = generator.generate(prompts)
    workers = vllm_compat.status().workers
    assert len(results) == len(prompts)
    errors = []
    for result, prompt, expected in zip(results, prompts, reference, strict=True):
        assert result["input_ids"].tolist() == prompt
        assert len(result["hidden_states"]) == len(layer_ids)
        for states, wanted in zip(result["hidden_states"], expected, strict=True):
            assert states.shape == wanted.shape
        got = torch.stack(result["hidden_states"]).float()
        rows = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        errors.append(rows.amax(dim=-1).tolist())
    return {
        "vllm_class": workers[0]["model"],
        "layers": workers[0]["layers"],
        "convention": workers[0]["convention"],
        "senders": [worker["rank"] for worker in workers if worker["captures"]],
        "workers": len(workers),
        "reported_dtype": workers[0]["dtype"].removeprefix("torch."),
        "dtype": str(results[0]["hidden_states"][0].dtype).removeprefix("torch."),
        "tokenizer": type(generator.tokenizer).__name__,
        "errors": errors,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    import vllm

    result = {"vllm": vllm.__version__}
    for name in ("vllm-compat", "speculators", "transformers", "torch"):
        result[name] = importlib.metadata.version(name)
    return result


def main(arguments: list[str]) -> None:
    folder, output = Path(arguments[0]), Path(arguments[1])
    size = int(arguments[2]) if len(arguments) > 2 else 1
    output.write_text(json.dumps(run(folder, size)))


if __name__ == "__main__":
    main(sys.argv[1:])
