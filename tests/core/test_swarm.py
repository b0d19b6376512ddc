"""Checked steps in seeded random worlds: thousands for every save, 300,000 with --all,
and 100,000 with recurrent layers.
"""

import pytest

from tests.circles import claimed
from tests.core.paths import ADAPTERS, EXECUTING, LARGE, PATHS, RARE
from tests.core.swarm import run_steps

STEPS = 300_000
STATE_STEPS = 100_000
ADAPTER_STEPS = 50_000


@pytest.mark.parametrize("steps", [2_000, *claimed([STEPS])])
def test_swarm(steps: int) -> None:
    score = run_steps(steps)
    print(
        f"{score.turns} checked steps, {score.worlds} worlds, {score.preempted} "
        f"preemptions"
    )
    print(*(f"{score.paths[path]} x {path}" for path in PATHS), sep="\n")
    assert score.turns >= steps
    assert score.preempted > steps / 200, (
        "the worlds are too kind: hardly any sample is preempted"
    )
    requested = (*LARGE, *EXECUTING) if steps < STEPS else PATHS
    rare = [path for path in requested if not score.paths[path]]
    assert not rare, "these paths were never taken"


@pytest.mark.parametrize("steps", claimed([ADAPTER_STEPS]))
def test_swarm_with_adapters(steps: int) -> None:
    score = run_steps(steps, adapters=True)
    assert score.turns >= steps
    rare = [path for path in ADAPTERS if not score.paths[path]]
    assert not rare, "these paths were never taken"


@pytest.mark.parametrize("steps", claimed([STATE_STEPS]))
def test_swarm_with_recurrent_layers(steps: int) -> None:
    score = run_steps(steps, states=True)
    assert score.turns >= steps
    paths = [*RARE[RARE.index("hit shortened by a state") :], *EXECUTING]
    rare = [path for path in paths if not score.paths[path]]
    assert not rare, "these paths were never taken"
