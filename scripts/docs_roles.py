"""A hook of mkdocs.yml: drops the roles (``:func:``) that docstrings have before names."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):(?=<code>)")


def on_page_content(html: str, **_: Any) -> str:
    """Drops the role and leaves the name."""
    return _ROLE.sub("", html)
