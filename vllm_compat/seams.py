"""Binds replacements at the seams, and takes them off again.

A replacement acts inside a generator only, unless its record says otherwise. For anybody
else, and after it was taken off, the name is what it was, even where somebody's wrapper still
holds on to it.
"""

from __future__ import annotations

import ast
import builtins
import contextvars
import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .errors import PatchConflictError
from .record import Patch, module_of

__all__ = ["SERVED", "Commit", "commit"]

SERVED: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "vllm_compat_session", default=None
)
"""The session of the generator that the code at hand works for; None outside of one."""

_ABSENT: Any = object()


@dataclass(frozen=True)
class _Bound:
    seam: str
    owner: Any
    attribute: str
    original: Any  # what was in the owner's own namespace, or _ABSENT
    ours: Any

    def now(self) -> Any:
        return vars(self.owner).get(self.attribute, _ABSENT)

    def restore(self) -> None:
        if self.original is _ABSENT:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.original)


class Commit:
    """The replacements that were bound together.

    Attributes:
        module: whose names they are.
        live: False for good once they were taken off.
        collisions: a sentence for each name that somebody else had replaced before; their
            replacement is kept underneath ours.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.live = True
        self.collisions: tuple[str, ...] = ()
        self._bound: list[_Bound] = []

    def bind(self, wanted: Sequence[_Bound]) -> None:
        """Binds all of them, or none."""
        try:
            for item in wanted:
                setattr(item.owner, item.attribute, item.ours)
                self._bound.append(item)
        except BaseException:
            self.undo()
            raise

    def overridden(self) -> list[str]:
        """A sentence for each name that somebody else has replaced since."""
        return [
            f"{item.seam} was replaced by {_owner(now)} after vllm-compat"
            for item in self._bound
            if (now := item.now()) is not item.ours
        ]

    def undo(self) -> list[str]:
        """Puts back what was there, where it is still ours.

        Returns:
            A sentence for each name that is not.
        """
        self.live = False
        left = self.overridden()
        for item in reversed(self._bound):
            if item.now() is item.ours:
                item.restore()
        self._bound.clear()
        return left

    def release(self, owner: ModuleType) -> None:
        """Takes off what is bound in this module itself: it is about to be executed anew."""
        for item in [b for b in self._bound if b.owner is owner]:
            if item.now() is item.ours:
                item.restore()
            self._bound.remove(item)


def commit(patches: Sequence[Patch], module: str) -> Commit:
    """Builds every replacement first, then binds them all.

    Args:
        patches: no two of them replace the same name.
        module: bind only this module's names. It is imported.

    Raises:
        PatchConflictError: a name is missing, or holds somebody's replacement that ours
            would never call. Nothing has changed.
    """
    made = Commit(module)
    wanted: list[_Bound] = []
    collisions: list[str] = []
    replacements = [
        (patch, seam, build)
        for patch in patches
        for seam, build in patch.replaces.items()
        if module_of(seam) == module
    ]
    for patch, seam, build in replacements:
        owner, attribute, original = _locate(seam, patch)
        value = original if original is not _ABSENT else _inherited(owner, attribute)
        foreign = _foreign(seam, owner, attribute, original)
        if foreign is not None:
            _check_kept(seam, patch, foreign)
            collisions.append(
                f"{seam} was replaced by {foreign} before; theirs is kept underneath"
            )
        ours = build(value)
        stand_in = (
            _door(made, ours, value)
            if isinstance(owner, type)
            else Switch(made, ours, value, seam in patch.anywhere)
        )
        wanted.append(_Bound(seam, owner, attribute, original, stand_in))
    made.collisions = tuple(collisions)
    made.bind(wanted)
    return made


def _locate(seam: str, patch: Patch) -> tuple[Any, str, Any]:
    """Owner, attribute, and what the owner's own namespace has there (or _ABSENT)."""
    module_name, _, path = seam.partition(":")
    owner: Any = sys.modules[module_name]
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    original = vars(owner).get(attribute, _ABSENT) if owner is not None else _ABSENT
    if owner is None or (original is _ABSENT and _inherited(owner, attribute) is _ABSENT):
        raise PatchConflictError(
            f"{seam} (patch {patch.name}) is not there. Nothing was changed."
        )
    if _is_ours(original):
        if original.vllm_compat_live():
            raise PatchConflictError(
                f"{seam} (patch {patch.name}) already carries a replacement by another copy "
                "of vllm-compat. Nothing was changed."
            )
        # Somebody who stood on top of ours put it back after we had gone.
        original = original.vllm_compat_original
        setattr(owner, attribute, original)
    return owner, attribute, original


def _inherited(owner: Any, attribute: str) -> Any:
    if isinstance(owner, type):
        return getattr(owner, attribute, _ABSENT)
    return getattr(builtins, attribute, _ABSENT)


# -- somebody else's replacements ---------------------------------------------------------


def _foreign(seam: str, owner: Any, attribute: str, original: Any) -> str | None:
    """Who has replaced this name before us; None if nobody did."""
    if original is _ABSENT:
        return None
    module = sys.modules[module_of(seam)]
    if isinstance(owner, type):
        return None if _home(original) == owner.__module__ else _owner(original)
    source = _imported_names(module).get(attribute)
    if source is None:
        return _owner(original)  # hides a builtin, and not by an import of the module's own
    home, name = source
    there: Any = sys.modules.get(home)
    expected = getattr(there, name, _ABSENT) if name else there
    if original is expected:
        return None
    # Patched at home after it was imported from there: then this one is the untouched one.
    same_package = _home(original).split(".")[0] == home.split(".")[0]
    return None if same_package else _owner(original)


def _check_kept(seam: str, patch: Patch, foreign: str) -> None:
    if seam in patch.discards:
        raise PatchConflictError(
            f"{seam} was replaced by {foreign}, and patch {patch.name} would never call "
            "that. Take theirs off before apply(), or leave ours out with "
            f"VLLM_COMPAT_SKIP={patch.name}. Nothing was changed."
        )


def _imported_names(module: ModuleType) -> dict[str, tuple[str, str]]:
    """What a module's own import statements bind: name to (module, attribute or '')."""
    found: dict[str, tuple[str, str]] = {}
    if module.__file__ is None:
        return found
    for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or top] = (top, "")
        elif isinstance(node, ast.ImportFrom):
            home = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), module.__package__ or ""
            )
            for alias in node.names:
                found[alias.asname or alias.name] = (home, alias.name)
    return found


def _home(value: Any) -> str:
    """The module whose code a value is, whatever functools.wraps wrote over it."""
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__"))
    if not isinstance(value, (type, ModuleType)) and not hasattr(value, "__name__"):
        value = type(value)
    return str(getattr(value, "__module__", None) or getattr(value, "__name__", ""))


def _owner(value: Any) -> str:
    """For messages: what a value is and where it comes from."""
    if value is _ABSENT:
        return "nothing (it was deleted)"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{_home(value)} ({name})"


# -- what stands at a seam ----------------------------------------------------------------


def _is_ours(value: Any) -> bool:
    # By the value's own mark: functools.wraps copies a function's attributes to whatever
    # wraps it, and another copy of this package has classes of its own.
    mark = getattr(value, "vllm_compat_mark", None)
    return mark is not None and mark() is value


def _door(made: Commit, ours: Any, original: Any) -> Callable[..., Any]:
    """Stands for a method: ours, until it is taken off."""

    @functools.wraps(original)
    def door(*args: Any, **kwargs: Any) -> Any:
        return (ours if made.live else original)(*args, **kwargs)

    door.vllm_compat_mark = lambda: door  # type: ignore[attr-defined]
    door.vllm_compat_live = lambda: made.live  # type: ignore[attr-defined]
    door.vllm_compat_original = original  # type: ignore[attr-defined]
    return door


class Switch:
    """Stands for a name of a module: ours inside a generator, the original anywhere else.

    ``anywhere`` makes it ours wherever it is called from, until it is taken off.

    What it stands for may be a class, a function or a module. It is passed through as far
    as the interpreter lets one object stand for another: it can be called, subclassed,
    asked about instances, pickled (as the original), and has the original's attributes.
    """

    __slots__ = ("_anywhere", "_commit", "_ours", "vllm_compat_original")

    def __init__(self, made: Commit, ours: Any, original: Any, anywhere: bool = False) -> None:
        set_own = functools.partial(object.__setattr__, self)
        set_own("_anywhere", anywhere)
        set_own("_commit", made)
        set_own("_ours", ours)
        set_own("vllm_compat_original", original)

    def vllm_compat_mark(self) -> Switch:
        return self

    def vllm_compat_live(self) -> bool:
        return bool(self._commit.live)

    def _standing(self) -> Any:
        if self._commit.live and (self._anywhere or SERVED.get() is not None):
            return self._ours
        return self.vllm_compat_original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._standing()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standing(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.vllm_compat_original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.vllm_compat_original, name)

    def __dir__(self) -> list[str]:
        return dir(self.vllm_compat_original)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.vllm_compat_original)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.vllm_compat_original)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.vllm_compat_original,)

    def __or__(self, other: Any) -> Any:
        return self.vllm_compat_original | other

    def __ror__(self, other: Any) -> Any:
        return other | self.vllm_compat_original

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Switch):
            other = other.vllm_compat_original
        return bool(self.vllm_compat_original == other)

    def __hash__(self) -> int:
        return hash(self.vllm_compat_original)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.vllm_compat_original,)

    def __repr__(self) -> str:
        return f"<vllm-compat in generators, elsewhere {self.vllm_compat_original!r}>"


def _itself(value: Any) -> Any:
    return value
