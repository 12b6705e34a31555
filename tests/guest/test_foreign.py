"""Another library that replaces the same names, before us or after us."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest

import vllm_compat
from vllm_compat import PatchConflictError, activation
from vllm_compat.seams import SERVED, Switch
from vllm_compat.state import Activation

from .state import State, faults

# Outside of a generator our replacements aren't asked. Request is replaced by functions that
# need a session; this one only lets them see that there is one.
IN_A_GENERATOR = object()


def tracing(name: str, calls: list[str]) -> Callable[[Any], Any]:
    """Another library's wrapper, of the usual kind."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def traced(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return traced

    return wrap


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def module(generator_module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generator's module; Request is one whose making is harmless."""
    for name in ("Request", "VllmConfig"):
        monkeypatch.setattr(generator_module, name, getattr(generator_module, name))
    generator = generator_module.VllmHiddenStatesGenerator
    monkeypatch.setattr(generator, "generate", vars(generator)["generate"])
    return generator_module


def request_arguments() -> dict[str, Any]:
    from vllm.sampling_params import SamplingParams

    return {
        "request_id": "r",
        "prompt_token_ids": [1, 2],
        "sampling_params": SamplingParams(max_tokens=1),
        "pooling_params": None,
        "eos_token_id": 2,
    }


def test_before_us(module: Any, calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Theirs is kept underneath, the collision is named, and revert() gives theirs back."""
    from vllm.v1.request import Request

    theirs = tracing("theirs", calls)(module.Request)
    module.Request = theirs
    before = State()
    report = vllm_compat.apply()
    (note,) = (n for n in report.notes if "before" in n)
    assert ":Request was replaced by" in note
    assert __name__ in note  # functools.wraps says vllm.v1.request; the code says who
    assert note in caplog.text
    assert isinstance(module.Request(**request_arguments()), Request)
    assert calls == ["theirs"]
    vllm_compat.revert()
    assert module.Request is theirs
    assert before.differences(State()) == []


def test_before_us_and_lost(module: Any, calls: list[str]) -> None:
    """VllmConfig is made by EngineArgs: theirs would never be called, so apply() refuses."""
    module.VllmConfig = theirs = tracing("theirs", calls)(module.VllmConfig)
    before = State()
    with pytest.raises(PatchConflictError) as caught:
        vllm_compat.apply()
    message = str(caught.value)
    assert ":VllmConfig was replaced by" in message
    assert __name__ in message
    assert "VLLM_COMPAT_SKIP=engine-args" in message
    assert message.count("\n") == 0
    assert before.differences(State()) == []
    assert module.VllmConfig is theirs
    assert not activation.is_active()


def test_before_us_on_a_method(module: Any, calls: list[str]) -> None:
    generator = module.VllmHiddenStatesGenerator
    generator.generate = theirs = tracing("theirs", calls)(vars(generator)["generate"])
    report = vllm_compat.apply()
    assert any("generate was replaced by" in note for note in report.notes)
    vllm_compat.revert()
    assert vars(generator)["generate"] is theirs


def test_patched_at_home_is_no_collision(
    module: Any, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm.v1.request.Request replaced after speculators has taken the untouched one."""
    import vllm.v1.request

    original = vllm.v1.request.Request
    monkeypatch.setattr(vllm.v1.request, "Request", tracing("theirs", calls)(original))
    report = vllm_compat.apply()
    assert not [n for n in report.notes if "Request" in n]
    assert module.Request.vllm_compat_original is original


def test_after_us(module: Any, calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Theirs stays at revert(), and reaches the original past ours."""
    from vllm.v1.request import Request

    vllm_compat.apply()
    module.Request = theirs = tracing("theirs", calls)(module.Request)
    (note,) = (n for n in vllm_compat.status(workers=False).notes if "after" in n)
    assert ":Request was replaced by" in note
    assert __name__ in note
    vllm_compat.revert()
    assert "left as it is" in caplog.text
    assert ":Request was replaced by" in caplog.text
    assert module.Request is theirs
    token = SERVED.set(IN_A_GENERATOR)
    try:
        assert isinstance(module.Request(**request_arguments()), Request)
    finally:
        SERVED.reset(token)
    assert calls == ["theirs"]


def test_after_us_and_on_again(module: Any, calls: list[str]) -> None:
    """No loop: the old replacement, underneath theirs, stays dead."""
    vllm_compat.apply()
    module.Request = tracing("theirs", calls)(module.Request)
    vllm_compat.revert()
    vllm_compat.apply()
    ours = module.Request
    assert isinstance(ours, Switch)
    old = ours.vllm_compat_original.__wrapped__
    assert isinstance(old, Switch)
    token = SERVED.set(IN_A_GENERATOR)
    try:
        assert old._standing() is old.vllm_compat_original
        assert ours._standing() is not ours.vllm_compat_original
    finally:
        SERVED.reset(token)


def test_after_us_and_taken_off_after_us(module: Any, calls: list[str]) -> None:
    """They put back what they had found, ours, when ours was gone already."""
    vllm_compat.apply()
    found = module.Request
    module.Request = tracing("theirs", calls)(found)
    vllm_compat.revert()
    module.Request = found
    vllm_compat.apply()
    assert faults(applied=True) == []
    vllm_compat.revert()
    assert faults(applied=False) == []


def test_on_a_method_after_us_and_on_again(module: Any, calls: list[str]) -> None:
    generator = module.VllmHiddenStatesGenerator
    vllm_compat.apply()
    generator.generate = theirs = tracing("theirs", calls)(vars(generator)["generate"])
    vllm_compat.revert()
    with pytest.raises(AttributeError, match="vllm_config"):
        generator.generate(object.__new__(generator), [[1, 2]])  # the original, through theirs
    assert calls == ["theirs"]
    vllm_compat.apply()
    assert vars(generator)["generate"].vllm_compat_live()
    # functools.wraps has copied our mark to theirs; it isn't taken for ours.
    vllm_compat.revert()
    assert vars(generator)["generate"] is theirs


def test_deleted_after_us(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm_compat.apply()
    del module.Request
    assert any("deleted" in n for n in vllm_compat.status(workers=False).notes)
    vllm_compat.revert()
    assert not hasattr(module, "Request")


def test_another_copy_of_this_package(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vendored, or of another version: two of them can't both drive a generator."""
    vllm_compat.apply()
    before = State()
    with monkeypatch.context() as patch:
        patch.setattr(activation, "_STATE", Activation())
        with pytest.raises(PatchConflictError, match="another copy"):
            vllm_compat.apply()
    assert before.differences(State()) == []


def test_a_name_that_is_not_there(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "Scheduler")
    before = State()
    with pytest.raises(
        PatchConflictError, match=r":Scheduler \(patch scheduler\) is not there"
    ):
        vllm_compat.apply()
    assert before.differences(State()) == []


def test_overridden_is_said_when_a_generator_is_made(
    module: Any, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    vllm_compat.apply()
    module.Request = tracing("theirs", calls)(module.Request)
    caplog.set_level(logging.WARNING, logger="vllm_compat")
    with pytest.raises(Exception, match="no-such-model"):
        module.VllmHiddenStatesGenerator("./no-such-model")
    assert ":Request was replaced by" in caplog.text
