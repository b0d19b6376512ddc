"""A few hostile worlds, each a test: what the runner adds to the core's own tests.

Not collected by itself: the swarm's own test runs thousands of them.
"""

import pytest

from tests.core.world import run_swarm

WORLDS = 300
TURNS = 60  # of one world before it is healed and drained


@pytest.mark.parametrize("seed", range(WORLDS))
def test_a_world_holds(seed: int) -> None:
    run_swarm(seed, TURNS)
