"""Checked steps in seeded random worlds: thousands for every save, 300,000 with --all."""

import pytest

from tests.circles import long
from tests.core.swarm import run_steps


@pytest.mark.parametrize("steps", [2_000, *long([300_000])])
def test_swarm(steps: int) -> None:
    turns, preempted, worlds = run_steps(steps)
    print(f"{turns} checked steps, {worlds} worlds, {preempted} preemptions")
    assert turns >= steps
    assert preempted > steps / 200, "the worlds have become too kind: hardly anybody gives way"
