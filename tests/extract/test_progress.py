"""What is said of a run while it goes on."""

from __future__ import annotations

import io

import pytest

from vllm_compat.extract.progress import Progress


def test_progress_is_over_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    stream = io.StringIO()
    progress = Progress(stream, done=5, total=30)
    now += 60  # replicas start: no part of the speed
    for replica in ("a:1", "b:2"):
        progress.add(500, failed=False, replica=replica)
    assert stream.getvalue().splitlines() == ["6 of 30 samples"]
    now += 10
    progress.add(700, failed=False, replica="a:1")
    now += 10
    progress.add(0, failed=True, replica="b:2")
    assert stream.getvalue().splitlines()[1:] == [
        "8 of 30 samples, 70 tokens/s, 2 replicas",
        "9 of 30 samples, 35 tokens/s, 2 replicas, 1 failed",
    ]
    now += 400  # b has died
    progress.add(280, failed=False, replica="a:1")
    assert stream.getvalue().splitlines()[3:] == ["10 of 30 samples, 2 tokens/s, 1 failed"]
