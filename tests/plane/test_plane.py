"""The whole control plane under fire: no violation, equal digests, and no vacuous
success.
"""

import pytest

from tests.circles import claimed
from tests.plane.planted import PLANTED, REAL
from tests.plane.run import compare

# What must have happened in the runs of the first test.
REQUIRED_EVENTS = (
    "aside",
    "bad",
    "burst",
    "client: broken engine_dead",
    "client: broken engine_error",
    "client: gone",
    "client: refused context_length_exceeded",
    "client: refused engine_dead",
    "client: refused engine_error",
    "client: refused overloaded",
    "client: refused twin",
    "client: whole",
    "disk full",
    "jump",
    "late",
    "leave",
    "life: broken",
    "life: killed",
    "life: second",
    "life: shut down",
    "short write",
    "slow",
    "steps: explode",
    "steps: fail",
    "steps: garble",
    "steps: lost",
    "steps: poison",
    "storm",
    "torn journal",
)


@pytest.mark.long
@pytest.mark.parametrize("runs", [40, *claimed([150])])
def test_runs_hold_and_repeat_in_another_process(runs: int) -> None:
    report = compare(0, runs)
    assert not report.flaws, f"{len(report.flaws)}: {next(iter(report.flaws.items()))}"
    assert not [kind for kind in REQUIRED_EVENTS if not report.tally[kind]]


FOUND_SOON = ("counted twice", "lost end")  # are found in the first seeds


@pytest.mark.long
@pytest.mark.parametrize(
    "bug", [*FOUND_SOON, *claimed(bug for bug in PLANTED if bug not in FOUND_SOON)]
)
def test_a_planted_bug_is_found(bug: str) -> None:
    # It takes two stop strings in one turn, a slow client of two prompts, two runs in one
    # second.
    seeds = 120 if bug == "overtaking" else 40 if bug in REAL else 16
    flaws = compare(0, seeds, plant=bug).flaws
    assert flaws
    assert bug != "set order" or set(flaws.values()) == {"two processes, two digests"}
