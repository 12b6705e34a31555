"""apply() touches the seams and nothing else; revert() puts back exactly what was there."""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import vllm_compat
from vllm_compat import activation
from vllm_compat.inspection import registry
from vllm_compat.record import module_of

from .state import GENERATOR, State, faults


def seams() -> set[str]:
    """As State calls them, of the patches that are on; some wait for another import."""
    return {
        seam.replace(":", ".")
        for entry in activation.current().entries
        if entry.state == "on"
        for seam in entry.patch.replaces
        if module_of(seam) in sys.modules
    }


def changed(before: State, now: State) -> set[str]:
    finder = "finders: "
    return {
        line.split(" ")[0] for line in before.differences(now) if not line.startswith(finder)
    }


def test_only_the_seams_change(generator_module: Any) -> None:
    """Of all attributes of vLLM, speculators, torch and transformers, and of their classes."""
    before = State()
    vllm_compat.apply()
    now = State()
    assert changed(before, now) == seams()
    assert len(now.names) > 1000  # a State that sees nothing can't differ
    assert now.finders[1:] == before.finders
    vllm_compat.revert()
    assert before.differences(State()) == []


def test_again_and_again(generator_module: Any) -> None:
    before = State()
    for _ in range(20):
        vllm_compat.apply()
        vllm_compat.apply()
        vllm_compat.revert()
    vllm_compat.revert()
    assert before.differences(State()) == []


def test_what_was_inherited_is_inherited_again(
    generator_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator whose generate() comes from a base class, as a later one might."""
    generator = generator_module.VllmHiddenStatesGenerator
    base = type("Base", (), {"generate": generator.generate})
    derived = type(
        "VllmHiddenStatesGenerator",
        (base,),
        {"__init__": generator.__init__, "__module__": generator.__module__},
    )
    monkeypatch.setattr(generator_module, "VllmHiddenStatesGenerator", derived)
    vllm_compat.apply()
    assert "generate" in vars(derived)
    assert vars(base)["generate"] is generator.generate
    vllm_compat.revert()
    assert "generate" not in vars(derived)
    assert derived.generate is generator.generate


def test_a_hidden_builtin_comes_to_light_again(generator_module: Any) -> None:
    """`sorted` is replaced for speculators 0.4: as a global, which wasn't there."""
    from vllm_compat.record import at
    from vllm_compat.seams import commit

    (patch,) = (p for p in registry() if at("sorted") in p.replaces)
    before = State()
    made = commit([patch], GENERATOR)
    assert generator_module.sorted is not sorted
    assert generator_module.sorted([3, 1]) == [1, 3]  # outside of a generator: the builtin
    made.undo()
    assert before.differences(State()) == []


def test_blocks_may_be_nested(generator_module: Any) -> None:
    with vllm_compat.applied() as outer:
        with vllm_compat.applied(transport="rpc") as inner:
            assert activation.options().transport == "rpc"
            assert inner.entries == outer.entries
        assert activation.options().transport == "auto"
        assert faults(applied=True) == []
    assert faults(applied=False) == []


def test_blocks_inside_of_apply(generator_module: Any) -> None:
    vllm_compat.apply(transport="rpc")
    with vllm_compat.applied(transport="shared"):
        assert activation.options().transport == "shared"
        vllm_compat.apply()  # says nothing about it
        assert activation.options().transport == "shared"
    assert faults(applied=True) == []
    assert activation.options().transport == "rpc"


def test_blocks_that_overlap(generator_module: Any) -> None:
    first, second = vllm_compat.applied(), vllm_compat.applied()
    with first:
        second.__enter__()
    assert faults(applied=True) == []
    second.__exit__(None, None, None)
    assert faults(applied=False) == []


def test_revert_inside_of_a_block(generator_module: Any) -> None:
    with vllm_compat.applied():
        vllm_compat.revert()
        assert faults(applied=False) == []
        vllm_compat.apply()
    # That apply() is not the block's to undo.
    assert faults(applied=True) == []


def test_a_block_that_ends_with_an_exception(generator_module: Any) -> None:
    with pytest.raises(ZeroDivisionError), vllm_compat.applied():
        raise ZeroDivisionError
    assert faults(applied=False) == []


def test_one_line_at_apply(
    generator_module: Any, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    caplog.set_level(logging.DEBUG, logger="vllm_compat")
    vllm_compat.apply()
    vllm_compat.apply()
    with vllm_compat.applied():
        pass
    vllm_compat.revert()
    (record,) = (r for r in caplog.records if r.name == "vllm_compat")
    assert record.levelno == logging.INFO
    assert "vLLM" in record.getMessage() or "vllm" in record.getMessage()
    assert capfd.readouterr() == ("", "")


# -- the module executed anew ---------------------------------------------------------------


@pytest.fixture
def reloadable(generator_module: Any) -> Iterator[Any]:
    """The module, as it was afterwards: reloading makes new classes."""
    namespace = dict(vars(generator_module))
    yield generator_module
    vllm_compat.revert()
    vars(generator_module).clear()
    vars(generator_module).update(namespace)
    sys.modules[GENERATOR] = generator_module
    # An import also binds the module in its package; the next test that asks the package
    # for it would get another module than the one that apply() finds.
    package, _, name = GENERATOR.rpartition(".")
    setattr(sys.modules[package], name, generator_module)


def test_reload(reloadable: Any) -> None:
    old = reloadable.VllmHiddenStatesGenerator
    originals = vars(old)["generate"], vars(old)["__init__"]
    vllm_compat.apply()
    importlib.reload(reloadable)
    assert reloadable.VllmHiddenStatesGenerator is not old
    assert faults(applied=True) == []
    vllm_compat.revert()
    assert faults(applied=False) == []
    assert (vars(old)["generate"], vars(old)["__init__"]) == originals


def test_imported_a_second_time(reloadable: Any) -> None:
    vllm_compat.apply()
    del sys.modules[GENERATOR]
    again = importlib.import_module(GENERATOR)
    assert again is not reloadable
    assert faults(applied=True) == []
    vllm_compat.revert()
    assert faults(applied=False) == []
    sys.modules[GENERATOR] = reloadable
    assert faults(applied=False) == []


def test_the_module_does_not_show_that_it_was_watched(reloadable: Any) -> None:
    loader = type(reloadable.__loader__)
    vllm_compat.apply()
    del sys.modules[GENERATOR]
    again = importlib.import_module(GENERATOR)
    assert type(again.__loader__) is loader
    assert type(again.__spec__.loader) is loader
    assert "class VllmHiddenStatesGenerator" in inspect.getsource(again)


# -- what stands at a seam ------------------------------------------------------------------


def test_outside_of_a_generator_a_name_is_what_it_was(generator_module: Any) -> None:
    """Somebody may take vLLM's names from speculators' module; they get vLLM's."""
    import torch
    from vllm.config import CacheConfig, LoadConfig
    from vllm.v1.request import Request

    vllm_compat.apply()
    made = generator_module.CacheConfig(block_size=16)
    assert type(made) is CacheConfig
    assert isinstance(made, generator_module.CacheConfig)
    assert not isinstance(LoadConfig(), generator_module.CacheConfig)
    assert generator_module.CacheConfig == CacheConfig
    assert {CacheConfig: 1}[generator_module.CacheConfig] == 1
    derived = type("Derived", generator_module.CacheConfig.__mro_entries__(()), {})
    assert issubclass(derived, generator_module.CacheConfig)

    class Mine(generator_module.Request):  # type: ignore[misc]
        pass

    assert Mine.__mro__[1] is Request
    assert generator_module.Request.from_engine_core_request == Request.from_engine_core_request
    assert pickle.loads(pickle.dumps(generator_module.Request)) is Request
    assert copy.deepcopy(generator_module.Request) is Request
    assert generator_module.torch.cuda is torch.cuda
    assert isinstance(torch.zeros(1), generator_module.torch.Tensor)
    assert generator_module.Request | None == Request | None
    assert "CacheConfig" in repr(generator_module.CacheConfig)


def test_the_generator_looks_the_same(generator_module: Any) -> None:
    generator = generator_module.VllmHiddenStatesGenerator
    names = ("__init__", "generate")

    def looks(name: str) -> tuple[Any, ...]:
        function = getattr(generator, name)
        return (
            inspect.signature(function),
            function.__doc__,
            function.__qualname__,
            function.__module__,
            inspect.getsource(function),
        )

    before = [looks(name) for name in names]
    with vllm_compat.applied():
        assert [looks(name) for name in names] == before
