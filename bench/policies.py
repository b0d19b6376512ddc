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
import math
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

from attrs import define, field, frozen

from bench.results import write
from minfer.config import EngineConfig
from minfer.effects.driver import QuietCollector
from minfer.engine import step
from minfer.messages import Admitted, Emit, Event, Execute, Executed, Submit, Tick, WakeAt
from minfer.plan import Plan
from minfer.policies import PREFILL, Ageing, Deadline, Fair, Priority, Shortest, Static, Window
from minfer.policy import FirstCome, Policy
from minfer.request import Request
from minfer.state import initial

STEP, TOKEN, CONTEXT = 4e-3, 19e-6, 0.02e-6  # seconds: per step, per token, per token read
TTFT, TPOT = 1.0, 0.05  # seconds: what counts as good
POLICIES: tuple[Policy, ...] = (
    FirstCome(), Priority(), Ageing(5.0), Deadline(), Shortest(0.05), Fair(),
    Window(wait=0.1, fill=8), Static(64),
)  # fmt: skip


@define
class Served:
    """What became of one request; times in seconds."""

    request: Request
    arrived: float
    started: float = math.inf
    first: float = math.inf
    last: float = math.inf
    turn: float = math.inf  # order of admission


def requests(path: Path, count: int, speed: float, seed: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds, and the request."""
    rng, begin = Random(seed), None
    with path.open() as file:
        for number, row in zip(range(count), csv.DictReader(file), strict=False):
            time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            begin = time if begin is None else begin
            yield (
                (time - begin) / speed,
                Request(
                    id=str(number),
                    prompt=(number % 1000,) * int(row["ContextTokens"]),
                    max_tokens=max(1, int(row["GeneratedTokens"])),
                    priority=-1 if rng.random() < 0.1 else 0,
                    client="big" if rng.random() < 0.6 else rng.choice(("a", "b", "c")),
                    deadline=rng.choice((1.0, 10.0)),
                    root=str(number).encode(),
                ),
            )


@frozen
class Promise:
    """A policy's guarantee in words, and as a test of (who was there first, who went first)."""

    words: str
    holds: Callable[[Served, Served], bool]


def promise(policy: Policy) -> Promise:
    """What `policy` guarantees about one request overtaking another."""

    def work(one: Served) -> float:
        return len(one.request.prompt) / PREFILL + one.request.max_tokens

    match policy:
        case Priority():
            return Promise(
                "only the more urgent overtake",
                lambda a, b: b.request.priority < a.request.priority,
            )
        case Ageing(seconds=s):
            return Promise(
                f"overtakes by {s:g} s per level at most",
                lambda a, b: b.arrived - a.arrived < s * (a.request.priority - b.request.priority),
            )
        case Deadline():
            return Promise(
                "in the order of deadlines",
                lambda a, b: b.arrived + b.request.deadline < a.arrived + a.request.deadline,
            )
        case Shortest(pace=p):
            return Promise(
                f"overtakes by {p:g} s per token of work at most",
                lambda a, b: b.arrived - a.arrived < p * (work(a) - work(b)),
            )
        case Fair():
            return Promise(
                "nobody passes a request of his own client",
                lambda a, b: a.request.client != b.request.client,
            )
    return Promise("nobody overtakes", lambda a, b: False)  # noqa: ARG005 - a test of a pair


class Simulated:
    """An executor on a virtual clock: steps take what they cost, one after the other."""

    def __init__(self) -> None:
        self.plans: deque[tuple[float, Plan]] = deque()  # done at
        self.free, self.busy = 0.0, 0.0

    def launch(self, plan: Plan, now: float) -> None:
        cost = STEP + TOKEN * sum(plan.counts) + CONTEXT * (sum(plan.starts) + sum(plan.counts))
        self.free = max(now, self.free) + cost
        self.busy += cost
        self.plans.append((self.free, plan))

    def due(self) -> float:
        return self.plans[0][0] if self.plans else math.inf

    def collect(self) -> Executed:
        plan = self.plans.popleft()[1]
        return Executed(plan.step, tuple((7,) * most for most in plan.most))


@define
class Run:
    """The trace through one policy."""

    config: EngineConfig
    served: dict[str, Served] = field(factory=dict)
    turns: int = 0

    def __call__(self, arrivals: list[tuple[float, Request]]) -> float:
        """Serve all; returns the share of time in which the executor worked."""
        state, machine, now, wake = initial(self.config), Simulated(), 0.0, math.inf
        coming = deque(arrivals)
        while coming or state.requests:
            now = max(now, min(machine.due(), wake, coming[0][0] if coming else math.inf))
            events: list[Event] = [Tick(now)]
            if machine.due() <= now:
                events.append(machine.collect())
            while coming and coming[0][0] <= now:
                time, request = coming.popleft()
                self.served[request.id] = Served(request, time)
                events.append(Submit(request))
            turn = step(self.config, state, tuple(events))
            state, wake, self.turns = turn.state, math.inf, self.turns + 1
            for command in turn.commands:
                match command:
                    case Execute(plan):
                        machine.launch(plan, now)
                    case WakeAt(time):
                        wake = time
                    case Emit():
                        self._emit(command, now)
            for reason in turn.reasons:
                if isinstance(reason, Admitted):
                    one = self.served[reason.id]
                    one.started = min(one.started, now)
                    one.turn = min(one.turn, self.turns)
        return machine.busy / now

    def _emit(self, emit: Emit, now: float) -> None:
        for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
            if tokens:
                one = self.served[name]
                one.first, one.last = min(one.first, now), now

    def violations(self, rule: Promise) -> int:
        """Pairs in which a later request was let in first although the policy forbids it."""
        order = sorted(self.served.values(), key=lambda s: s.arrived)
        broken = 0
        for i, mine in enumerate(order):
            for other in order[i + 1 :]:
                if other.arrived > mine.started:
                    break
                if other.turn < mine.turn and other.arrived > mine.arrived:
                    broken += not rule.holds(mine, other)
        return broken


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


def measure(policy: Policy, arrivals: list[tuple[float, Request]]) -> dict[str, Any]:
    config = EngineConfig(
        num_blocks=7000, block_size=64, max_model_len=16384, max_num_seqs=64,
        max_num_batched_tokens=2048, vocab_size=1000, policy=policy,
    )  # fmt: skip
    run = Run(config)
    load = run(arrivals)
    every = list(run.served.values())
    rule = promise(policy)

    def ttft(some: list[Served]) -> list[float]:
        return [one.first - one.arrived for one in some]

    tpot = {
        one.request.id: (one.last - one.first) / (one.request.max_tokens - 1)
        for one in every
        if one.request.max_tokens > 1
    }
    good = [s for s in every if s.first - s.arrived <= TTFT and tpot.get(s.request.id, 0) <= TPOT]
    return {
        "policy": type(policy).__name__, "ttft": percentiles(ttft(every)),
        "tpot": percentiles(list(tpot.values())),
        "goodput": len(good) / max(s.last for s in every), "good": len(good) / len(every),
        "urgent": percentiles(ttft([s for s in every if s.request.priority < 0])),
        "small_clients": percentiles(ttft([s for s in every if s.request.client != "big"])),
        "in_time": sum(s.first - s.arrived <= s.request.deadline for s in every) / len(every),
        "busy": load, "turns": run.turns, "promise": rule.words, "broken": run.violations(rule),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="azure_code_2023.csv")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--speed", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with QuietCollector():
        for speed in args.speed:
            arrivals = list(requests(args.trace, args.requests, speed, args.seed))
            rows = [measure(policy, arrivals) for policy in POLICIES]
            results[f"{speed:g}x"] = rows
            print(f"\n{args.requests} requests at {speed:g} times their pace; in ms\n")
            print("| policy | TTFT p50 | p99 | TPOT p50 | p99 | goodput/s | good | urgent p99 "
                  "| small clients p99 | in time | busy | promise | broken |")  # fmt: skip
            print("|" + " --- |" * 13)
            for r in rows:
                ms = [r["ttft"]["p50"], r["ttft"]["p99"], r["tpot"]["p50"], r["tpot"]["p99"]]
                print(
                    f"| {r['policy']} | {' | '.join(f'{1000 * x:.0f}' for x in ms)} | "
                    f"{r['goodput']:.2f} | {r['good']:.1%} | {1000 * r['urgent']['p99']:.0f} | "
                    f"{1000 * r['small_clients']['p99']:.0f} | {r['in_time']:.1%} | "
                    f"{r['busy']:.0%} | {r['promise']} | {r['broken']} |"
                )
    write("policies", results, args.seed)


if __name__ == "__main__":
    main()
