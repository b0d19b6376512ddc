"""The kit, shown: what it finds, and that it passes what is sound.

`python -m tests.kit.ten_runs` tries each broken policy, and each that comes with minfer,
with ten seeds at Hypothesis' default budget, and prints how many of the runs found
something, and what.
"""

import argparse
import sys
import time
from collections import Counter
from typing import Any, Final

from bench.results import write
from minfer.policies.builtin import Ageing, Deadline, Priority, Shortest, Static, Window
from minfer.policies.fair_queue import FairQueue
from minfer.policies.fair_seats import FairSeats
from minfer.records.policy import FirstCome
from minfer.testing import PolicyError, check_policy
from minfer.values.pmap import Map
from tests.kit.broken import BROKEN
from tests.kit.example_sound import TwoClasses
from tests.kit.example_starving import AdaptiveLastIn

# Policies, and the bounds that they need: a window of 4 s gathers for 4 s; of shortest
# first with 20 s for a token, a request of 20 and a short prompt lets shorter ones pass
# for 420 s.
SOUND: Final[tuple[tuple[Any, dict[str, float]], ...]] = (
    (FirstCome(), {}),
    (Priority(), {}),
    (Ageing(), {}),
    (Ageing(0.5, 2), {}),
    (Deadline(), {}),
    (Deadline(0.0), {}),
    (Shortest(), {}),
    (Shortest(0.0), {}),
    (Shortest(20.0), {"patience": 420}),
    (FairQueue(), {}),
    (FairQueue(Map({"a": 3.0, "b": 0.25})), {}),
    (FairSeats(least=1, newcomers=1), {}),
    (FairSeats(Map({"a": 3.0, "b": 0.25}), least=2), {}),
    (Window(), {}),
    (Window(0.5, 2, wait=0.9, fill=3, urgent=-3, part=1.0), {}),
    (Window(wait=4.0, fill=4, urgent=-9), {"hold": 4.0}),
    (Static(), {}),
    (Static(2), {}),
    (TwoClasses(), {}),
    (TwoClasses(0.3), {}),
)


def tried(policy: Any, seed: int, bounds: dict[str, Any]) -> str:
    """The law that `policy` was found to break, or nothing."""
    try:
        check_policy(policy, seed=seed, **bounds)
    except PolicyError as error:
        return error.law
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--result", metavar="NAME", help="write bench/results/NAME.json")
    args = parser.parse_args()
    wrong, reported = 0, dict[str, Any]()
    policies: list[tuple[Any, dict[str, float], bool]]
    policies = [(AdaptiveLastIn(), {}, True), *((kind(), {}, True) for kind in BROKEN)]
    for policy, bounds, broken in (
        *policies,
        *((policy, bounds, False) for policy, bounds in SOUND),
    ):
        begin, laws = time.perf_counter(), Counter[str]()
        for seed in range(args.seed, args.seed + args.runs):
            laws[tried(policy, seed, bounds)] += 1
        num_found = args.runs - laws.pop("", 0)
        wrong += num_found != (args.runs if broken else 0)
        took = (time.perf_counter() - begin) / args.runs
        name = f"{type(policy).__name__:20}" if broken else f"{policy}"
        reported[name.strip()] = {
            "broken": broken,
            "found": num_found,
            "laws": laws,
            "seconds": took,
        }
        summary = (
            ", ".join(f"{law} {count}" for law, count in laws.most_common()) or "sound"
        )
        print(
            f"{name} found {num_found}/{args.runs} in {took:.1f} s each: {summary}",
            flush=True,
        )
    print(
        f"{wrong} policies are not as they should be" if wrong else "all as it should be"
    )
    if args.result:
        write(
            args.result,
            {"runs": args.runs, "wrong": wrong, "policies": reported},
            args.seed,
        )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
