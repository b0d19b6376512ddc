"""Every scheduling policy on the same real trace, in virtual time: what each buys, and its promise.

The trace (Azure LLM inference 2023, code; Splitwise, ISCA 2024) gives arrivals and lengths. It
says nothing of clients, priorities and deadlines: those are drawn here from the seed (60% of the
requests are one client's, the rest of three; one in ten is urgent; half want their first token
within 1 s, half within 10 s). A step costs what a 7B model on one H200 takes, from measured
figures: 4 ms, 19 us per token, 0.02 us per token of context read. Prompts share nothing.
`--speed` plays the trace faster: as it is it loads that card by a tenth.

A promise is checked on every pair of requests of which the later was let in first.
"""

import argparse
import csv
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from bench.results import percentiles, run, show
from bench.virtual import Arrivals, Served, Virtual
from minfer.config import EngineConfig
from minfer.effects.driver import quiet_collector
from minfer.effects.dry import Dry
from minfer.plan import Plan
from minfer.policies import PREFILL, Ageing, Deadline, Fair, Priority, Shortest, Static, Window
from minfer.policy import FirstCome, Policy
from minfer.request import Request

TTFT, TPOT = 1.0, 0.05  # seconds: what counts as good
POLICIES: tuple[tuple[Policy, str], ...] = (  # with what each promises
    (FirstCome(), "nobody overtakes"),
    (Priority(), "only the more urgent overtake"),
    (Ageing(5.0), "overtakes by 5 s per level at most"),
    (Deadline(), "in the order of deadlines"),
    (Shortest(0.05), "overtakes by 0.05 s per token of work at most"),
    (Fair(), "nobody passes a request of his own client"),
    (Window(wait=0.1, fill=8), "overtakes by 10 s per level at most"),
    (Static(64), "nobody overtakes"),
)


def requests(path: Path, count: int, speed: float, seed: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds, and the request."""
    rng, begin = Random(seed), None
    with path.open() as file:
        for number, row in zip(range(count), csv.DictReader(file), strict=False):
            time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            begin = time if begin is None else begin
            request = Request(
                id=str(number),
                prompt=(number % 1000,) * int(row["ContextTokens"]),
                max_tokens=max(1, int(row["GeneratedTokens"])),
                priority=-1 if rng.random() < 0.1 else 0,
                client="big" if rng.random() < 0.6 else rng.choice(("a", "b", "c")),
                deadline=rng.choice((1.0, 10.0)),
                root=str(number).encode(),
            )
            yield (time - begin) / speed, request


def cost(plan: Plan) -> float:
    return 4e-3 + 19e-6 * sum(plan.counts) + 0.02e-6 * (sum(plan.starts) + sum(plan.counts))


def may_overtake(policy: Policy, late: Served, early: Served) -> bool:
    """Whether the policy's promise allows that `late`, who came later, is admitted first."""
    behind, wants, has = late.arrived - early.arrived, late.request, early.request
    match policy:
        case Priority():
            return wants.priority < has.priority
        case Ageing(seconds=seconds):
            return behind < seconds * (has.priority - wants.priority)
        case Deadline():
            return behind < has.deadline - wants.deadline
        case Shortest(pace=pace):
            prompts = (len(has.prompt) - len(wants.prompt)) / PREFILL
            return behind < pace * (prompts + has.max_tokens - wants.max_tokens)
        case Fair():
            return wants.client != has.client
    return False


def violations(policy: Policy, every: list[Served]) -> int:
    """Pairs in which a later request was let in first although the policy forbids it."""
    broken = 0
    for i, early in enumerate(every):
        for late in every[i + 1 :]:
            if late.arrived > early.started:
                break
            if late.turn < early.turn and late.arrived > early.arrived:
                broken += not may_overtake(policy, late, early)
    return broken


def replay(policy: Policy, promise: str, arrivals: Arrivals) -> dict[str, Any]:
    config = EngineConfig(
        num_blocks=7000, max_model_len=16384, max_num_seqs=64, vocab_size=1000, policy=policy
    )
    engine = Virtual(config, Dry([[7]]), cost, deque(arrivals))
    with quiet_collector():
        every = engine.run()
    good = sum(one.ttft <= TTFT and one.tpot <= TPOT for one in every)
    return {
        "policy": type(policy).__name__, "ttft": percentiles([one.ttft for one in every]),
        "tpot": percentiles([one.tpot for one in every if one.request.max_tokens > 1]),
        "goodput": good / max(one.last for one in every), "good": good / len(every),
        "urgent": percentiles([one.ttft for one in every if one.request.priority < 0]),
        "small_clients": percentiles([one.ttft for one in every if one.request.client != "big"]),
        "in_time": sum(one.ttft <= one.request.deadline for one in every) / len(every),
        "busy": engine.busy / engine.now, "turns": engine.turns,
        "promise": promise, "broken": violations(policy, every),
    }  # fmt: skip


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, list[dict[str, Any]]] = {f"{speed:g}x": [] for speed in args.speed}
    for speed, rows in zip(args.speed, results.values(), strict=True):
        arrivals = list(requests(args.trace, args.requests, speed, args.seed))
        print(f"{args.requests} requests at {speed:g} times their pace; times in seconds")
        for policy, promise in POLICIES:
            rows.append(replay(policy, promise, arrivals))
            show(rows[-1])
    return results


if __name__ == "__main__":
    run("policies", measure, {
        "trace": {"type": Path, "help": "azure_code_2023.csv"}, "--requests": 5000,
        "--speed": {"type": float, "nargs": "+", "default": [1.0, 4.0]}, "--seed": 0,
    })  # fmt: skip
