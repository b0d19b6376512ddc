"""Volume: at least 300,000 checked steps in seeded random worlds."""

from tests.core.swarm import run_steps

STEPS = 300_000


def test_swarm() -> None:
    turns, preempted, worlds = run_steps(STEPS)
    print(f"{turns} checked steps, {worlds} worlds, {preempted} preemptions")
    assert turns >= STEPS
    assert preempted > STEPS / 200, "the worlds have become too kind: hardly anybody gives way"
