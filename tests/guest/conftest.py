"""The generator's module, imported once; and processes for what can't share one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import vllm_compat

from .processes import Zygote
from .state import GENERATOR


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks processes that have torch and transformers, but no vLLM and no speculators."""
    pytest.importorskip("vllm")
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def generator_module() -> Iterator[Any]:
    """speculators' module, in this process, with no patches on before and after."""
    pytest.importorskip("vllm")
    vllm_compat.revert()
    yield importlib.import_module(GENERATOR)
    vllm_compat.revert()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "SKIP", "UNTESTED", "TRANSPORT"):
        monkeypatch.delenv(f"VLLM_COMPAT_{name}", raising=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a tiny Llama, its tokenizer included."""
    from conformance.models import FAMILIES, write_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(FAMILIES[0], folder)
    return folder
