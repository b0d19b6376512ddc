"""The swarm: seeded random worlds by the hundred thousand steps.

`python -m tests.core.swarm --steps 5000000` runs it for long; a failure prints the seed
that repeats it. `--states`: all worlds have recurrent layers; `--adapters`: slots for
adapters.
"""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from attrs import define, field

from tests.core.paths import PATHS
from tests.core.world import run_swarm

TURNS = 60  # of one world before it is healed


@define
class Score:
    """What some worlds went through."""

    turns: int = 0
    preempted: int = 0
    worlds: int = 0
    paths: Counter[str] = field(factory=Counter)  # of the core: how many turns took each

    def add(self, other: "Score") -> None:
        """Count other worlds in."""
        self.turns += other.turns
        self.preempted += other.preempted
        self.worlds += other.worlds
        self.paths += other.paths


def run_many(
    first: int, worlds: int, *, states: bool = False, adapters: bool = False
) -> Score:
    """Worlds of seeds first .. first+worlds-1; `states`: all with recurrent layers,
    `adapters`: all with slots for adapters. Raises AssertionError with the seed that
    failed.
    """
    score = Score()
    for seed in range(first, first + worlds):
        try:
            world = run_swarm(seed, TURNS, states=states, adapters=adapters)
        except BaseException as error:
            story = traceback.format_exc()
            raise AssertionError(f"swarm seed {seed}: {error!r}\n{story}") from None
        score.add(Score(world.turns, world.preempted, 1, world.paths))
    return score


def run_steps(
    steps: int,
    first: int = 0,
    jobs: int | None = None,
    *,
    states: bool = False,
    adapters: bool = False,
) -> Score:
    """At least `steps` turns in `jobs` processes, by default one for each core."""
    jobs, score = jobs or os.cpu_count() or 1, Score()
    with ProcessPoolExecutor(jobs) as pool:
        while score.turns < steps:
            missing = max(1, (steps - score.turns) // (2 * TURNS) // (2 * jobs))
            batch = min(200, missing)
            starts = [first + score.worlds + i * batch for i in range(jobs * 2)]
            run_batch = partial(run_many, states=states, adapters=adapters)
            for batch_score in pool.map(run_batch, starts, [batch] * len(starts)):
                score.add(batch_score)
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    parser.add_argument("--jobs", type=int, help="processes; by default one a core")
    parser.add_argument(
        "--states", action="store_true", help="all worlds have recurrent layers"
    )
    parser.add_argument(
        "--adapters", action="store_true", help="all worlds have slots for adapters"
    )
    args = parser.parse_args()
    begin = time.perf_counter()
    kinds = {"states": args.states, "adapters": args.adapters}
    score = run_steps(args.steps, args.seed, args.jobs, **kinds)
    took = time.perf_counter() - begin
    print(
        f"{score.turns} checked steps in {score.worlds} worlds, {score.preempted} "
        f"preemptions, "
        f"no violation, {took:.0f} s"
    )
    for path in PATHS:
        print(f"{score.paths[path]:>10} turns: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
