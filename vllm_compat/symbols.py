"""Looks up classes, functions and their parameters in installed sources, without importing.

``apply()`` may run before vLLM is imported and must not import it; the drift check must
read a vLLM that isn't installed at all. Both read the files as text.

A symbol is written ``package.module:Name`` or ``package.module:Class.member``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Found", "Sources", "Symbol"]

_MAX_REEXPORTS = 8


@dataclass(frozen=True)
class Symbol:
    """An upstream name that a patch relies on.

    Attributes:
        path: ``package.module:Name`` or ``package.module:Class.member``.
        parameters: names that the callable must accept.
        if_gone: what the user would see if it moved, as one clause.
        since: PEP 440 specifier of the versions that have it; empty for all.
    """

    path: str
    parameters: tuple[str, ...] = ()
    if_gone: str = ""
    since: str = ""


@dataclass(frozen=True)
class Found:
    """What a look-up found.

    Attributes:
        path: the symbol as it was asked for.
        kind: ``class``, ``function``, ``value`` or ``module``.
        parameters: parameter names of a function, or of a class's ``__init__`` (for a
            dataclass: its fields); without ``self``. Empty for a value.
        open_ended: whether it takes ``**kwargs``.
    """

    path: str
    kind: str
    parameters: tuple[str, ...] = ()
    open_ended: bool = False

    def accepts(self, *names: str) -> bool:
        """Whether each of these can be passed by keyword."""
        return self.open_ended or all(name in self.parameters for name in names)


class Sources:
    """The source files of some packages.

    Args:
        roots: package name to the folder that holds its ``__init__.py``. A package not
            named here is looked for where Python would import it from.
    """

    def __init__(self, roots: Mapping[str, Path] | None = None) -> None:
        self._roots: dict[str, Path | None] = dict(roots or {})
        # For the life of this object: syntax trees are large, and apply() needs them once.
        self._texts: dict[str, str] = {}
        self._trees: dict[str, ast.Module | None] = {}

    def root(self, package: str) -> Path | None:
        """The folder of a top-level package, or None if it isn't installed."""
        if package not in self._roots:
            self._roots[package] = _installed_root(package)
        return self._roots[package]

    def file(self, module: str) -> Path | None:
        """The source file of a module, or None."""
        package, _, rest = module.partition(".")
        root = self.root(package)
        if root is None:
            return None
        base = root.joinpath(*rest.split(".")) if rest else root
        if (base / "__init__.py").is_file():
            return base / "__init__.py"
        path = base.with_suffix(".py")
        return path if rest and path.is_file() else None

    def text(self, module: str) -> str:
        """The source of a module; empty if there is none, or it isn't UTF-8."""
        if module not in self._texts:
            path = self.file(module)
            try:
                self._texts[module] = path.read_text(encoding="utf-8") if path else ""
            except UnicodeDecodeError:
                self._texts[module] = ""
        return self._texts[module]

    def says(self, module: str, text: str) -> bool:
        """Whether a module's source has this text; False if there is no such module."""
        return text in self.text(module)

    def matches(self, module: str, pattern: str) -> bool:
        """Whether a regular expression matches a module's source; its lines each for itself."""
        return re.search(pattern, self.text(module), re.MULTILINE) is not None

    def find(self, symbol: str) -> Found | None:
        """Looks a symbol up; follows re-exports and base classes inside the packages."""
        module, _, name = symbol.partition(":")
        if not name:
            return Found(symbol, "module") if self.file(module) else None
        node = self._resolve(module, name.split(".")[0], _MAX_REEXPORTS)
        if node is None:
            return None
        home, statement = node
        for member in name.split(".")[1:]:
            if not isinstance(statement, ast.ClassDef):
                return None
            inner = self._member(home, statement, member, _MAX_REEXPORTS)
            if inner is None:
                return None
            home, statement = inner
        return self._describe(symbol, home, statement)

    def names(self, module: str) -> list[str]:
        """The names that a module's own statements bind."""
        tree = self._tree(module)
        bound: set[str] = set()
        for statement in _statements(tree.body if tree is not None else []):
            bound.update(_names(statement))
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                bound.update((a.asname or a.name).split(".")[0] for a in statement.names)
        return sorted(bound)

    def imports(self, module: str, package: str) -> list[str]:
        """What a module's own statements import from a package, as symbols."""
        tree = self._tree(module)
        return [
            f"{statement.module}:{alias.name}"
            for statement in (tree.body if tree is not None else ())
            if isinstance(statement, ast.ImportFrom) and not statement.level
            if (statement.module or "").split(".")[0] == package
            for alias in statement.names
        ]

    def unresolved(self, module: str, package: str) -> list[str]:
        """What a module imports from a package that doesn't have it."""
        return [
            name
            for name in self.imports(module, package)
            if self.find(name) is None and self.find(name.replace(":", ".")) is None
        ]

    # -- reading ---------------------------------------------------------------------

    def _tree(self, module: str) -> ast.Module | None:
        """What a module declares. Its functions have no bodies: nobody asks for those."""
        if module not in self._trees:
            self._trees[module] = _declarations(self.text(module))
        return self._trees[module]

    def _resolve(self, module: str, name: str, depth: int) -> tuple[str, ast.stmt] | None:
        if depth == 0 or name not in self.text(module):  # most often: nothing to parse for
            return None
        tree = self._tree(module)
        for statement in _statements(tree.body if tree is not None else []):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        source = self._absolute(module, statement)
                        if self.file(f"{source}.{alias.name}"):
                            return f"{source}.{alias.name}", statement
                        if (found := self._resolve(source, alias.name, depth - 1)) is not None:
                            return found
            elif name in _names(statement):
                return module, statement
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        path = self.file(module)
        parts = module.split(".")
        if path is None or path.name != "__init__.py":
            parts = parts[:-1]
        parts = parts[: len(parts) - (statement.level - 1)]
        return ".".join([*parts, statement.module] if statement.module else parts)

    def _member(
        self, home: str, owner: ast.ClassDef, name: str, depth: int
    ) -> tuple[str, ast.stmt] | None:
        for statement in _statements(owner.body):
            if name in _names(statement):
                return home, statement
        # Members that a method puts on self are as good as declared ones.
        if _puts_on_self(self.text(home), owner.name, name):
            return home, ast.Pass()
        for base in owner.bases:
            if depth and isinstance(base, ast.Name):
                above = self._resolve(home, base.id, depth)
                if above and isinstance(above[1], ast.ClassDef) and above[1] is not owner:
                    found = self._member(above[0], above[1], name, depth - 1)
                    if found is not None:
                        return found
        return None

    def _describe(self, symbol: str, home: str, node: ast.stmt) -> Found:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _function(symbol, node)
        if isinstance(node, ast.ClassDef):
            init = self._member(home, node, "__init__", _MAX_REEXPORTS)
            if init is not None and isinstance(init[1], ast.FunctionDef):
                signature = _function(symbol, init[1])
                return Found(symbol, "class", signature.parameters, signature.open_ended)
            return Found(symbol, "class", tuple(self._fields(home, node, _MAX_REEXPORTS)))
        if isinstance(node, ast.ImportFrom):
            return Found(symbol, "module")
        return Found(symbol, "value")

    def _fields(self, home: str, owner: ast.ClassDef, depth: int) -> Iterator[str]:
        for base in owner.bases:
            if depth and isinstance(base, ast.Name):
                above = self._resolve(home, base.id, depth)
                if above and isinstance(above[1], ast.ClassDef) and above[1] is not owner:
                    yield from self._fields(above[0], above[1], depth - 1)
        for statement in owner.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                yield statement.target.id


def _installed_root(package: str) -> Path | None:
    module = sys.modules.get(package)
    origin = getattr(module, "__file__", None)
    if origin is None:
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        # A folder without __init__.py (a source checkout's parent, say) has no origin.
        origin = spec.origin if spec is not None else None
    if origin is None or not origin.endswith("__init__.py"):
        return None
    return Path(origin).parent


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, the ones inside ``if`` and ``try`` too."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _statements(statement.body)
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _names(statement: ast.stmt) -> tuple[str, ...]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return (statement.name,)
    if isinstance(statement, ast.Assign):
        return tuple(t.id for t in statement.targets if isinstance(t, ast.Name))
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return (statement.target.id,)
    return ()


def _puts_on_self(text: str, owner: str, name: str) -> bool:
    """Whether a method of a top-level class has a statement ``self.name = ...``."""
    start = re.search(rf"^class {re.escape(owner)}\b", text, re.MULTILINE)
    if start is None:
        return False
    after = re.compile(r"^[A-Za-z_@]", re.MULTILINE).search(text, start.end())
    body = text[start.end() : after.start() if after else len(text)]
    statement = rf"^[ \t]+self\.{re.escape(name)}[ \t]*(?::|=(?!=))"
    return re.search(statement, body, re.MULTILINE) is not None


_DEF = re.compile(r"^([ \t]*)(?:async[ ]+)?def[ ]", re.MULTILINE)
_HEADER_END = re.compile(r":[ \t]*(?:#.*)?$", re.MULTILINE)


@lru_cache
def _at_most(width: int) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]{{0,{width}}}[^\s#]", re.MULTILINE)


def _declarations(text: str) -> ast.Module | None:
    """Parses a module without the bodies of its functions: a tenth of the time.

    Where they end is told by indentation. A text inside of quotes can belie that; then
    quotes or syntax don't come out even, and the whole module is parsed.
    """
    with contextlib.suppress(SyntaxError, _Uneven):
        return ast.parse(_without_bodies(text))
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


class _Uneven(Exception):
    """A cut would go through a text in triple quotes."""


def _without_bodies(text: str) -> str:
    kept: list[str] = []
    start = position = 0
    while found := _DEF.search(text, position):
        not_deeper = _at_most(len(found[1]))
        line_end = text.find("\n", found.end())
        header_end = _HEADER_END.search(text, found.end())
        if line_end < 0 or header_end is None:
            break
        after = not_deeper.search(text, line_end)
        # The bracket that closes the parameters stands where the def stands.
        while after and after.start() < header_end.start() and after[0].endswith(")"):
            after = not_deeper.search(text, text.find("\n", after.start()))
        if after is not None and after.start() <= header_end.start():
            position = line_end  # the body is on the line of the header
            continue
        after = not_deeper.search(text, header_end.end())
        end = after.start() if after else len(text)
        body = text[header_end.end() : end]
        if (body.count('"""') + body.count("'''")) % 2:
            raise _Uneven
        kept += (text[start : header_end.end()], f"\n{found[1]}    ...\n")
        start = position = end
    return "".join((*kept, text[start:]))


def _function(symbol: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Found:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return Found(symbol, "function", tuple(names), arguments.kwarg is not None)
