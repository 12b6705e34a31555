"""What a process looks like, to see that nothing of it has changed.

Used in the tests' own process and in children, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ast
import builtins
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
PACKAGES = ("vllm", "speculators", "torch", "transformers", "multiprocessing", "builtins")

# Modules that apply() may bring in: our own, and the one dependency.
OURS = ("vllm_compat", "packaging")


class State:
    """References to everything that somebody else could notice a change of.

    Args:
        deep: also every attribute of the modules of PACKAGES that are loaded, and of the
            classes that they define.
    """

    def __init__(self, deep: bool = True) -> None:
        self.environment = dict(os.environ)
        self.finders = list(sys.meta_path)
        self.hooks = list(sys.path_hooks)
        self.path = list(sys.path)
        self.filters = list(warnings.filters)
        self.modules = dict(sys.modules)
        self.loggers = {
            name: (logger.level, logger.propagate, logger.disabled, tuple(logger.handlers))
            for name, logger in (
                ("root", logging.getLogger()),
                ("vllm", logging.getLogger("vllm")),
                ("vllm_compat", logging.getLogger("vllm_compat")),
                ("speculators", logging.getLogger("speculators")),
            )
        }
        self.names = dict(_names()) if deep else {}

    def differences(self, now: State) -> list[str]:
        """One line for each thing that is not what it was; nothing for modules that came."""
        found = [
            f"os.environ[{name!r}]: {self.environment.get(name)} -> {now.environment.get(name)}"
            for name in sorted({*self.environment, *now.environment})
            if self.environment.get(name) != now.environment.get(name)
        ]
        for what in ("finders", "hooks", "path", "filters", "loggers"):
            before, after = getattr(self, what), getattr(now, what)
            if before != after:
                found.append(f"{what}: {before} -> {after}")
        for name, module in self.modules.items():
            if now.modules.get(name) is not module:
                found.append(f"sys.modules[{name!r}] is another")
        for owner, before in self.names.items():
            after = now.names.get(owner, {})
            found += [f"{owner}.{n} came" for n in after if n not in before]
            found += [f"{owner}.{n} went" for n in before if n not in after]
            found += [
                f"{owner}.{n} is another"
                for n in before
                if n in after and before[n] is not after[n]
            ]
            if list(before) != list(after) and set(before) == set(after):
                found.append(f"{owner}: its names stand in another order")
        return found

    def brought(self, now: State) -> set[str]:
        """Top-level packages outside of the standard library that were imported since."""
        return {
            top
            for name in set(now.modules) - set(self.modules)
            if (top := name.split(".")[0]) not in (*sys.stdlib_module_names, *OURS)
        }


def _names() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in PACKAGES or type(module) is not ModuleType:
            continue
        namespace = dict(vars(module))
        yield name, namespace
        for attribute, value in namespace.items():
            if isinstance(value, type) and value.__module__ == name:
                yield f"{name}.{attribute}", dict(vars(value))


def imported_names(module: ModuleType) -> dict[str, tuple[str, str]]:
    """What a module's own ``from X import Y`` statements bind: name to (X, Y)."""
    assert module.__file__ is not None
    found = {}
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = (str(node.module), alias.name)
    return found


def faults(applied: bool) -> list[str]:
    """What is not as it has to be in the generator's module, patches on or off."""
    from vllm_compat.activation import current
    from vllm_compat.inspection import registry
    from vllm_compat.seams import Switch

    module = sys.modules[GENERATOR]
    generator = module.VllmHiddenStatesGenerator
    replaced = {
        seam.partition(":")[2]
        for entry in current().entries
        if applied and entry.state == "on"
        for seam in entry.patch.replaces
    }
    found = [] if replaced or not applied else ["no patch says that it is on"]
    for name, (home, attribute) in imported_names(module).items():
        bound, original = vars(module).get(name), getattr(sys.modules[home], attribute)
        if name in replaced:
            if not isinstance(bound, Switch) or bound.vllm_compat_original is not original:
                found.append(f"{name} is not ours over the original: {bound!r}")
        elif bound is not original:
            found.append(f"{name} is not the original: {bound!r}")
    for name in ("__init__", "generate"):
        ours = hasattr(vars(generator)[name], "vllm_compat_mark")
        if ours != (f"VllmHiddenStatesGenerator.{name}" in replaced):
            found.append(f"VllmHiddenStatesGenerator.{name}: ours is {ours}")
    if not isinstance(module.torch, Switch if "torch" in replaced else ModuleType):
        found.append(f"torch is {module.torch!r}")
    seams = {seam.partition(":")[2] for patch in registry() for seam in patch.replaces}
    hidden = {name for name in seams if name in vars(module) and name in dir(builtins)}
    if hidden - replaced:
        found.append(f"{hidden} hide builtins")
    return found
