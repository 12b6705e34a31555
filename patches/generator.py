"""``VllmHiddenStatesGenerator``: a door in front of its constructor and of ``generate``."""

from __future__ import annotations

from ..record import Patch, Symbol, at
from ..session import guarded_generate, guarded_init

PATCHES = (
    Patch(
        name="generator-door",
        why=(
            "bad input reaches the scheduler, stays there after the error and breaks every "
            "later call; a failed call leaves requests and workers behind"
        ),
        upstream="speculators 0.3.0 and 0.4.0, vllm_hidden_states_generator.py, generate()",
        delete_when="speculators' releases with the generator are no longer supported",
        needed=lambda look: True,
        replaces={
            at("VllmHiddenStatesGenerator.__init__"): guarded_init,
            at("VllmHiddenStatesGenerator.generate"): guarded_generate,
        },
        relies_on=(
            Symbol(
                at("VllmHiddenStatesGenerator.__init__"),
                ("model_path", "layer_ids", "max_model_len"),
                "the generator is not the one that is known",
            ),
            Symbol(at("VllmHiddenStatesGenerator.generate"), ("token_ids",)),
        ),
    ),
)
