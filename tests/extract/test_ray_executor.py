"""vLLM's own Ray executor under the generator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import LOOPBACK

pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize(
    ("where", "transport"), [("here", "RingOutbox"), ("unreachable", "ReplyOutbox")]
)
def test_a_generator_with_rays_executor(checkpoint: Path, where: str, transport: str) -> None:
    """States equal to those of the multiprocess executor, and nothing left behind."""
    script = Path(__file__).with_name("ray_executor.py")
    # vLLM looks for the machine by its address, which this setting keeps from Ray.
    environment = {k: v for k, v in os.environ.items() if k != LOOPBACK}
    done = subprocess.run(
        [sys.executable, script, checkpoint, where],
        capture_output=True, text=True, timeout=400, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found == {
        "executor": "RayDistributedExecutor",
        "transport": transport,
        "same": True,
        "worker lives": False,
        "groups": ["REMOVED"],
        "free": 1.0,
    }
