"""The swarm: seeded random worlds by the hundred thousand steps.

`python -m tests.core.swarm --steps 5000000` runs it for long; a failure prints the seed that
repeats it.
"""

import argparse
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

from tests.core.world import run_swarm

TURNS = 60  # of one world before it is healed


def run_many(first: int, worlds: int) -> tuple[int, int]:
    """Worlds of seeds first .. first+worlds-1; returns turns taken and sequences preempted."""
    turns = preempted = 0
    for seed in range(first, first + worlds):
        try:
            world = run_swarm(seed, TURNS)
        except BaseException as error:
            story = traceback.format_exc()
            raise AssertionError(f"swarm seed {seed}: {error!r}\n{story}") from None
        turns += world.turns
        preempted += world.preempted
    return turns, preempted


def run_steps(steps: int, first: int = 0, jobs: int | None = None) -> tuple[int, int, int]:
    """At least `steps` turns over all cores; returns turns, preemptions and worlds."""
    jobs = jobs or os.cpu_count() or 1
    turns = preempted = worlds = 0
    with ProcessPoolExecutor(jobs) as pool:
        while turns < steps:
            missing = max(1, (steps - turns) // TURNS // jobs)
            batch = min(200, missing)
            starts = [first + worlds + i * batch for i in range(jobs * 2)]
            for took, gave in pool.map(run_many, starts, [batch] * len(starts)):
                turns += took
                preempted += gave
            worlds += batch * len(starts)
    return turns, preempted, worlds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    args = parser.parse_args()
    begin = time.perf_counter()
    turns, preempted, worlds = run_steps(args.steps, args.seed)
    took = time.perf_counter() - begin
    print(
        f"{turns} checked steps in {worlds} worlds, {preempted} preemptions, no violation, "
        f"{took:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
