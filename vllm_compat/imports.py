"""Acts on the import of a module that isn't imported yet.

A finder stands first in ``sys.meta_path`` between ``apply()`` and ``revert()``: a library with
post-import hooks leaves its finder there for good, and has no hook for what must be in place
*while* a module is executed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # At run time it would take longer to import than all of this package.
    from importlib.abc import Loader

__all__ = ["ImportWatch"]

Around = Callable[[], AbstractContextManager[object]]


class ImportWatch:
    """Wraps the execution of some modules, reloads included.

    Args:
        around: module name to a factory of context managers; the module is executed inside.
    """

    def __init__(self, around: dict[str, Around]) -> None:
        self._around = dict(around)
        self._looking = threading.local()

    def start(self) -> None:
        """Begins to watch."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Takes the finder out again."""
        # A list of its own: an import in another thread walks along the present one, and
        # would step over a finder if those behind ours moved up.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that executes it inside of ours."""
        if fullname not in self._around or getattr(self._looking, "now", False):
            return None
        # Other finders of our kind ask all finders too; each asks once.
        self._looking.now = True
        try:
            spec = self._others(fullname, path, target)
        finally:
            self._looking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, self._around[fullname])  # type: ignore[assignment]
        return spec

    def _others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _Around:
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
