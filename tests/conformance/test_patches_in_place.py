"""What apply() turned on is what the records say of these versions: no more, no less."""

from __future__ import annotations

from typing import Any


def test_release_numbers_and_probes_agree(report: Any) -> None:
    """On a release, a record's specifier and its probe can't differ: one of them is wrong.

    A patch that is on where the specifier says it isn't needed would be on without need.
    """
    wrong = [
        f"{entry.patch.name}: {entry.state}, but by the release numbers "
        f"({entry.patch.vllm or 'any vLLM'}; {entry.patch.speculators or 'any speculators'}) "
        f"{'it is' if entry.patch.expected(report.environment) else 'it is not'} needed"
        for entry in report.entries
        if (entry.state in ("on", "waiting")) != entry.patch.expected(report.environment)
    ]
    assert not wrong, "\n".join(wrong)


def test_something_is_on(report: Any) -> None:
    assert report.active
