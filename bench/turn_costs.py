"""Turns that touch everything, as multiples of a steady turn in the same run.

A steady turn commits and plans 1,024 running sequences at depth 2 with 64-token blocks.
Beside it, in the same process and in alternation: turns in which all are cancelled,
thousands arrive, a step fails, blocks run out, blocks are small, an eviction comes after
a million uses, or a long prompt is new. Most are one turn taken again and again from the
same state, which is a value; a storm and churn are runs of turns. `--before TREE`
measures the core of another tree as well, case by case.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from attrs import evolve, frozen

from bench.core_step import BLOCK, MAX_OUTPUT_TOKENS, VOCAB, Load, MadeUp
from bench.results import percentiles, run, show
from bench.trees import HERE, EngineWorker, serve
from minfer.blocks.keys import block_keys
from minfer.blocks.ownership import Transaction
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.engine import step
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Event, Failed, Finish, Submit, Tick
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition, initial

ROWS = 1024
WAITING_SAMPLES = 9_500  # samples that wait while others are cancelled
USES = 1_000_000
STORM = 300  # turns
Measure = Callable[[], list[float]]  # milliseconds of one repetition's turns


class Engine:
    """An engine whose turns are taken by hand; results are made up."""

    def __init__(self, **sizes: Any) -> None:
        usual = {
            "num_blocks": ROWS * (4096 // BLOCK),
            "block_size": BLOCK,
            "max_model_len": 1 << 18,
            "max_num_seqs": ROWS,
            "max_num_batched_tokens": 8192,
            "vocab_size": VOCAB,
        }
        self.config = EngineConfig(**{**usual, **sizes})
        self.executor, self.made = MadeUp([[0]]), 0
        self.go_on(initial(self.config))

    def go_on(self, state: EngineState) -> None:
        """Go on from a state, with its steps in flight."""
        self.state = state
        self.executor.plans = deque(state.inflight)

    def results(self) -> tuple[Event, ...]:
        return (self.executor.collect(),) if self.executor.plans else ()

    def turn(self, *events: Event) -> float:
        """Take a turn; returns its milliseconds."""
        events = (Tick(self.state.time + 0.01), *self.results(), *events)
        begin = time.thread_time()
        transition = step(self.config, self.state, events)
        took = 1e3 * (time.thread_time() - begin)
        self.perform(transition)
        return took

    def perform(self, transition: Transition) -> None:
        self.state = transition.state
        new = len(self.state.inflight) - len(self.executor.plans)
        for plan in self.state.inflight[len(self.state.inflight) - new :]:
            self.executor.launch(plan)

    def request(self, length: int, **overrides: Any) -> Request:
        self.made += 1
        prompt = tuple(
            (self.made * 7919 + 31 * i) % (VOCAB - 1) + 1 for i in range(length)
        )
        keys = block_keys(b"", prompt, self.config.block_size)
        settings = {
            "max_tokens": MAX_OUTPUT_TOKENS,
            "stop_ids": frozenset((0,)),
            "keys": keys,
            **overrides,
        }
        return Request(id=f"r{self.made}", prompt=prompt, **settings)

    def fill(
        self, rows: int, length: Callable[[int], int], turns: int = 70, **overrides: Any
    ) -> None:
        """Let `rows` sequences run, and `turns` pass once they do."""
        count = rows // overrides.get("n", 1)
        self.turn(*(Submit(self.request(length(i), **overrides)) for i in range(count)))
        while (
            len(self.state.running) < rows
            or self.state.running.num_known_at_admission > self.state.running.scheduled
        ):
            self.turn()
        for _ in range(turns):
            self.turn()

    def again(self, *events: Event, instead: tuple[Event, ...] | None = None) -> Measure:
        """The next turn with these events, taken from the same state each time."""
        results = self.results() if instead is None else instead
        all_events = (Tick(self.state.time + 0.01), *results, *events)
        config, state = self.config, self.state

        def once() -> list[float]:
            begin = time.thread_time()
            transition = step(config, state, all_events)
            took = 1e3 * (time.thread_time() - begin)
            del transition
            return [took]

        return once


def _spread(i: int) -> int:
    """Lengths of prompts whose block ends are spread over the steps."""
    return 1024 + i % BLOCK


def cancels() -> Measure:
    engine = Engine()
    engine.fill(ROWS, _spread)
    return engine.again(*(Cancel(name) for name, _ in engine.state.running.ids))


def _crowd(engine: Engine) -> None:
    """A queue that no request leaves: there are few blocks, and its head needs more."""
    pool = engine.state.blocks
    change = Transaction(pool)
    change.take(pool.available - 64)  # as if others had them
    engine.state = evolve(engine.state, blocks=change.done())
    large = engine.request(128 * BLOCK)
    engine.turn(*(Submit(evolve(large, id=f"waits {i}")) for i in range(WAITING_SAMPLES)))


def cancels_of_two() -> Measure:
    """The second sample of each has ended, so it is neither in line nor running."""
    engine = Engine(max_num_batched_tokens=1 << 16)
    engine.fill(ROWS, _spread, n=2)
    names = list(dict.fromkeys(name for name, _ in engine.state.running.ids))[:500]
    engine.turn(*(Finish(name, 1, 9) for name in names))
    while engine.state.fences:
        engine.turn()
    _crowd(engine)
    return engine.again(*(Cancel(name) for name in names))


def cancels_in_line() -> Measure:
    engine = Engine()
    engine.fill(ROWS, _spread)
    _crowd(engine)
    pairs = [engine.request(BLOCK, n=2) for _ in range(500)]
    engine.turn(*map(Submit, pairs))
    return engine.again(*(Cancel(pair.id) for pair in pairs))


def submits() -> Measure:
    engine = Engine()
    engine.fill(ROWS, _spread)
    return engine.again(*(Submit(engine.request(2 * BLOCK)) for _ in range(10_000)))


def failed_step() -> Measure:
    engine = Engine()
    engine.fill(ROWS, lambda i: 1000 + i % BLOCK, turns=1000)
    return engine.again(instead=(Failed(engine.state.inflight[0].step, "boom"),))


def storm() -> Measure:
    """All tables end at the same step, and there are blocks for a third of them."""
    engine = Engine(num_blocks=ROWS * 5 + ROWS // 3)
    engine.fill(ROWS, lambda _: 5 * BLOCK - 40, turns=0)
    start = engine.state

    def once() -> list[float]:
        engine.go_on(start)
        return [engine.turn() for _ in range(STORM)]

    return once


def churn() -> Measure:
    load = Load(ROWS, churn=True, block_size=16)
    load.block(300)
    return lambda: load.block(50)


def first_eviction() -> Measure:
    """Cached blocks, each of them used again after a million uses of another."""
    room = ROWS * 18 + 4096
    engine = Engine(num_blocks=room)
    old = [engine.request(4 * BLOCK, max_tokens=1) for _ in range(1000)]
    engine.turn(*map(Submit, old))
    while engine.state.requests or engine.state.fences:
        engine.turn()
    engine.fill(ROWS - 1, _spread)
    pool = engine.state.blocks
    change = Transaction(pool)
    leaves = [block for _, block in sorted(pool.prefix.idle.items())]
    for _ in range(USES):
        change.prefix.hold(leaves[0])
        change.prefix.release(leaves[0])
    for leaf in leaves[1:]:
        change.prefix.hold(leaf)
        change.prefix.release(leaf)
    change.take(change.pool.free)  # all that is free: as if others had it
    engine.state = evolve(engine.state, blocks=change.done())
    return engine.again(Submit(engine.request(BLOCK)))


def _cold(keys: bool) -> Measure:
    """No other row runs: all of the turn is the prompt's."""
    engine = Engine()
    cold = engine.request(100_000)
    return engine.again(Submit(cold if keys else evolve(cold, keys=())))


def cold_prompt() -> Measure:
    return _cold(keys=True)


def cold_prompt_without_keys() -> Measure:
    return _cold(keys=False)


@frozen
class Case:
    """A turn, or a run of turns, to be compared with a steady one."""

    what: str
    prepare: Callable[[], Measure]
    aim: float  # multiples of a steady turn, at most
    statistic: str = "p50"  # of all turns


CASES = {
    "cancels": Case("1,024 cancels of running requests", cancels, 12),
    "cancels_of_two": Case(
        f"500 cancels of n = 2, one sample over, {WAITING_SAMPLES:,} waiting",
        cancels_of_two,
        12,
    ),
    "cancels_in_line": Case(
        f"500 cancels of n = 2 in a line of {WAITING_SAMPLES + 1000:,}",
        cancels_in_line,
        12,
    ),
    "submits": Case("10,000 submits", submits, 120),
    "failed_step": Case("a failed step, rows of 2,000 tokens", failed_step, 18),
    "storm": Case("a storm of preemptions, p99", storm, 6, "p99"),
    "churn": Case("churn, blocks of 16 tokens", churn, 3),
    "first_eviction": Case("the first eviction after a million uses", first_eviction, 5),
    "cold_prompt": Case("a new prompt of 100,000 tokens with its keys", cold_prompt, 1),
    "cold_prompt_without_keys": Case(
        "the same without keys", cold_prompt_without_keys, 7
    ),
}


def multiples(name: str, repetitions: int) -> dict[str, Any]:
    """A case beside steady turns, in alternation."""
    case = CASES[name]
    with paused_collector():
        steady, measure = Load(ROWS), case.prepare()
        steady.block(200)
        measure()
        pairs = [(steady.block(20), measure()) for _ in range(repetitions)]
    turn = median(ms for block, _ in pairs for ms in block)
    took = percentiles([ms for _, turns in pairs for ms in turns])[case.statistic]
    ratios = [percentiles(ms)[case.statistic] / median(block) for block, ms in pairs]
    return {
        "what": case.what,
        "steady_ms": turn,
        "turn_ms": took,
        "multiple": took / turn,
        "low": min(ratios),
        "high": max(ratios),
        "aim": case.aim,
    }


def _trees(before: Path | None) -> Iterator[tuple[str, Path]]:
    if before is not None:
        yield "before", before
    yield "now", HERE


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.serve:
        serve({"multiples": multiples})
        return None
    results: dict[str, dict[str, Any]] = {}
    for name in args.cases or CASES:
        for label, tree in _trees(args.before):
            with EngineWorker(tree, "bench.turn_costs") as worker:
                figures = worker("multiples", name=name, repetitions=args.repetitions)
            results.setdefault(name, {})[label] = figures
            show({"tree": label, **figures})
    return None if args.cases else {"rows": ROWS, "block_size": BLOCK, "cases": results}


if __name__ == "__main__":
    run(
        "turn_costs",
        measure,
        {
            "--before": {"type": Path, "help": "another tree, to be measured as well"},
            "--cases": {
                "nargs": "*",
                "choices": [*CASES],
                "help": "these only, not written",
            },
            "--repetitions": {"type": int, "default": 15},
            "--serve": {"action": "store_true", "help": argparse.SUPPRESS},
        },
    )
