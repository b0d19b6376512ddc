"""Every scheduling policy on one trace, in virtual time: what each buys, and whether it
keeps its promise on every pair of requests of which the later was let in first.

    python -m tests.effects.promises --trace azure_code_2023.csv

The trace (Azure LLM inference 2023, code; Splitwise, ISCA 2024) gives arrivals and
lengths. It says nothing of clients, priorities and deadlines: those are drawn from the
seed, as `minfer simulate --mix` does. Steps cost what it takes by default: about a 7B
model on one H200. `--speed` plays the trace faster: as it is it loads that card by a
quarter.
"""

import argparse
import math
from collections.abc import Iterable
from typing import Any

from attrs import define

from bench.results import percentiles, run, show
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.effects.runs.arrivals import ArrivalTrace
from minfer.effects.runs.costs import H200
from minfer.effects.runs.report import Report
from minfer.effects.runs.trace_files import read_trace
from minfer.policies.builtin import (
    PROMPT_TOKENS_PER_OUTPUT,
    Ageing,
    Deadline,
    Priority,
    Shortest,
    Static,
    Window,
)
from minfer.policies.fair_queue import FairQueue
from minfer.policies.fair_seats import FairSeats
from minfer.records.config import EngineConfig
from minfer.records.messages import Admitted, Emit, Submit
from minfer.records.policy import FirstCome, Policy
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.simulation.simulate import Arrival, Simulated, Simulation

TTFT, TPOT = 1.0, 0.05  # seconds: what counts as good
POLICIES: tuple[tuple[Policy, str], ...] = (  # with what each promises
    (FirstCome(), "no request overtakes"),
    (Priority(), "only the more urgent overtake"),
    (Ageing(5.0), "overtakes by 5 s per level at most"),
    (Deadline(), "in the order of deadlines"),
    (Shortest(0.05), "overtakes by 0.05 s per token of work at most"),
    (FairQueue(), "no request passes a more urgent one, or one of its own client"),
    (FairSeats(), "no request passes one of its own client and class"),
    (Window(wait=0.1, fill=8), "overtakes by 10 s per level at most"),
    (Static(64), "no request overtakes"),
)


@define
class Served:
    """What became of one request; times in seconds."""

    request: Request
    arrived: float
    entered: float = math.inf  # when the engine learnt of it: all that a policy knows
    started: float = math.inf
    turn: float = math.inf  # in which it was admitted
    first: float = math.inf  # token

    @property
    def ttft(self) -> float:
        return self.first - self.arrived


def served(arrivals: Iterable[Arrival], turns: Iterable[Turn]) -> list[Served]:
    """What became of each request, in their order."""
    found = {
        one.id: Served(one, time) for time, one in arrivals if isinstance(one, Request)
    }
    for turn in turns:
        now = turn.transition.state.time
        for event in turn.events:
            if isinstance(event, Submit):
                found[event.request.id].entered = now
        for reason in turn.transition.reasons:
            if isinstance(reason, Admitted):
                one = found[reason.id]
                one.started, one.turn = min(one.started, now), min(one.turn, turn.number)
        for emit in (c for c in turn.transition.commands if isinstance(c, Emit)):
            for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens:
                    found[name].first = min(found[name].first, now)
    return [*found.values()]


def may_overtake(policy: Policy, late: Served, early: Served) -> bool:
    """Whether the policy's promise allows that `late`, who came later, is
    admitted first.
    """
    behind, wants, has = late.entered - early.entered, late.request, early.request
    match policy:
        case Priority():
            return wants.priority < has.priority
        case Ageing(seconds=seconds):
            return behind < seconds * (has.priority - wants.priority)
        case Deadline():
            return behind < has.deadline - wants.deadline
        case Shortest(pace=pace):
            prompts = (len(has.prompt) - len(wants.prompt)) / PROMPT_TOKENS_PER_OUTPUT
            return behind < pace * (prompts + has.max_tokens - wants.max_tokens)
        case FairSeats():
            mine = wants.client, wants.priority
            return mine != (has.client, has.priority)
        case FairQueue():
            same = wants.priority == has.priority
            return wants.client != has.client if same else wants.priority < has.priority
    return False


def violations(policy: Policy, every: list[Served]) -> int:
    """Pairs in which a later request was let in first although the policy forbids it."""
    broken = 0
    for i, early in enumerate(every):
        for late in every[i + 1 :]:
            if late.entered > early.started:
                break
            if late.turn < early.turn:
                broken += not may_overtake(policy, late, early)
    return broken


def replay(
    policy: Policy, promise: str, trace: ArrivalTrace, speed: float, seed: int
) -> dict[str, Any]:
    """One policy on the trace."""
    length = max(16384, *trace.sizes)
    config = EngineConfig(
        num_blocks=7000, max_model_len=length, max_num_seqs=64, policy=policy
    )
    report, arrivals = Report(config, TTFT, TPOT), [*trace.arrivals(64, speed, seed)]
    with paused_collector():
        turns = Simulation(
            config, Simulated(), H200, report.note_arrivals(arrivals)
        ).turns()
        every = served(arrivals, report.fold_turns(turns))
    found = report.figures()
    ttft = {
        "urgent": [one.ttft for one in every if one.request.priority < 0],
        "small_clients": [one.ttft for one in every if one.request.client != "big"],
    }
    return {
        "policy": type(policy).__name__,
        "ttft": found["ttft"],
        "tpot": found["tpot"],
        "goodput": found["goodput"],
        "good": found["good"],
        **{name: percentiles(values) for name, values in ttft.items() if values},
        "in_time": sum(one.ttft <= one.request.deadline for one in every) / len(every),
        "busy": found["busy"],
        "turns": found["turns"],
        "promise": promise,
        "broken": violations(policy, every),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, list[dict[str, Any]]] = {f"{speed:g}x": [] for speed in args.speed}
    trace = read_trace(args.trace, args.requests)
    for speed, rows in zip(args.speed, results.values(), strict=True):
        print(f"{args.requests} requests at {speed:g} times their pace; times in seconds")
        for policy, promise in POLICIES:
            rows.append(replay(policy, promise, trace, speed, args.seed))
            show(rows[-1])
    return results


if __name__ == "__main__":
    run(
        "policies",
        measure,
        {
            "--trace": {"required": True, "help": "azure_code_2023.csv"},
            "--requests": 5000,
            "--speed": {"type": float, "nargs": "+", "default": [1.0, 4.0]},
            "--seed": 0,
        },
    )
