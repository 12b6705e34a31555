"""Every order of the two imports, apply() and revert(), each in a process of its own."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from typing import Any

import pytest

from .processes import Zygote
from .state import GENERATOR, State, faults

STEPS = ("import vllm", "import the generator", "apply", "revert")
ORDERS = tuple(itertools.permutations(STEPS))


def test_no_order_is_missing() -> None:
    (mark,) = (m for m in test_order.pytestmark if m.name == "parametrize")
    tried = {tuple(order) for order in mark.args[1]}
    assert len(tried) == math.factorial(len(STEPS))
    assert all(set(order) == set(STEPS) for order in tried)


@pytest.mark.parametrize("order", ORDERS, ids=lambda o: "-".join(s.split()[-1] for s in o))
def test_order(zygote: Zygote, order: tuple[str, ...]) -> None:
    assert zygote.call("guest.test_orders:play", order) == []


def play(order: list[str]) -> list[str]:
    """In the child: does the steps, and returns what was wrong after any of them."""
    import vllm_compat

    found: list[str] = []
    applied = False
    # Twice apply, twice revert, and once more each, whatever came before.
    for step in [*order, "apply", "apply", "revert", "revert", "apply", "revert"]:
        before = State(deep=False)
        if step == "import vllm":
            import vllm  # noqa: F401
        elif step == "import the generator":
            importlib.import_module(GENERATOR)
        elif step == "apply":
            vllm_compat.apply()
            applied = True
        else:
            vllm_compat.revert()
            applied = False
        found += [f"after {step}: {fault}" for fault in _wrong(step, applied, before)]
    return found


def _wrong(step: str, applied: bool, before: State) -> list[str]:
    import vllm_compat

    now = State(deep=False)
    found = []
    if not step.startswith("import"):
        # One finder, and that only while the patches are on.
        ours = [f for f in now.finders if type(f).__module__.startswith("vllm_compat")]
        if len(ours) != applied:
            found.append(f"{len(ours)} finders")
        for state in (before, now):
            state.finders = [
                f for f in state.finders if not type(f).__module__.startswith("vllm_compat")
            ]
        found += before.differences(now)
        if brought := before.brought(now):
            found.append(f"it imported {brought}")
    loaded = GENERATOR in sys.modules
    if loaded:
        found += faults(applied)
    states = {e.state for e in vllm_compat.status(workers=False).entries}
    expected: set[Any] = {"not needed", ("on" if loaded else "waiting") if applied else "off"}
    if states != expected:
        found.append(f"states are {states}, not {expected}")
    return found
