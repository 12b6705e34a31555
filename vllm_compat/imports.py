"""Acts on the import of a module that isn't imported yet.

A finder stands first in ``sys.meta_path`` while there is something to wait for, and goes
when there isn't: a library with post-import hooks leaves its finder there for good, and has
no hook for what must be in place *while* a module is executed.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ImportWatch"]

Around = Callable[[], AbstractContextManager[object]]


class ImportWatch(MetaPathFinder):
    """Wraps the first import of some modules.

    Args:
        around: module name to a factory of context managers; the module is executed inside.
    """

    def __init__(self, around: dict[str, Around]) -> None:
        self._around = dict(around)
        self._looking = threading.local()

    def start(self) -> None:
        """Begins to watch; does nothing if it does already."""
        if self._around and self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Takes the finder out again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self._around or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.now = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Around(spec.loader, self._around[fullname])
        return spec


class _Around(Loader):
    """Stands in for a module's loader during its execution only."""

    def __init__(self, loader: Loader, around: Around) -> None:
        self._loader = loader
        self._around = around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not show that it was watched: later readers of __loader__
        # (inspect, pickle, importlib.resources) get the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._around():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
