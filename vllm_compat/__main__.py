"""``python -m vllm_compat``: the same as the command ``vllm-compat``."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
