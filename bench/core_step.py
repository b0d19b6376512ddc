"""Cost of one turn of the core (commit and plan), without any executor.

Claims measured: the median and the 99th percentile of a turn at 1 to 1,024 running sequences, in a
steady decode and with churn (outputs of 250 tokens on average, a finished request replaced by a
new one), with block ends spread over the steps and all at the same step; and that neither context
length nor a pool full of idle cached blocks makes a turn dearer (paired ratios: two engines take
turns in one run, so that the machine's noise hits both).

Results are fed back as an executor would at depth 2; making them up is not timed.
"""

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from operator import add

from attrs import define, field

from bench.results import write
from minfer.config import EngineConfig
from minfer.effects.driver import QuietCollector
from minfer.engine import step
from minfer.keys import block_keys
from minfer.messages import Emit, Event, Execute, Executed, Submit, Tick
from minfer.plan import Plan
from minfer.request import Request
from minfer.state import EngineState, initial

BLOCK = 64
VOCAB = 32_000
MOST = 8192  # output tokens of a steady decode: more than a run takes turns


@define
class Load:
    """A workload that keeps `running` sequences busy, one timed turn at a time."""

    running: int
    context: int = 1024  # tokens of a prompt
    churn: bool = False
    aligned: bool = False
    idle_blocks: int = 0
    shared: bool = False  # prompts are one document, all but the last block
    seed: int = 0
    rng: random.Random = field(init=False)
    config: EngineConfig = field(init=False)
    state: EngineState = field(init=False)
    plans: deque[Plan] = field(factory=deque)
    inbox: list[Event] = field(factory=list)
    made: int = 0
    clock: float = 0.0
    document: tuple[int, ...] = ()
    filling: bool = True
    ready: deque[Request] = field(factory=deque)

    def __attrs_post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        per_seq = (self.context + (512 if self.churn else MOST)) // BLOCK + 2
        blocks = self.running * per_seq + self.idle_blocks + self.context // BLOCK + 64
        self.config = EngineConfig(
            num_blocks=blocks,
            block_size=BLOCK,
            max_model_len=self.context + 2 * MOST,
            max_num_seqs=self.running,
            max_num_batched_tokens=max(8192, self.running + self.context),
            vocab_size=VOCAB,
            depth=2,
        )
        self.state = initial(self.config)
        self.document = self._tokens(self.context)
        self._fill_cache()
        self.filling = False
        for _ in range(self.running):
            self._submit()
        while len(self.state.running) < self.running or any(
            s < b for s, b in zip(self.state.running.sched, self.state.running.base, strict=True)
        ):
            self.turn()

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(1, VOCAB), k=count))

    def _request(self) -> Request:
        self.made += 1
        tail = 0 if self.aligned else self.rng.randrange(BLOCK)
        if self.shared:
            prompt = self.document[: self.context - BLOCK] + self._tokens(BLOCK + tail)
        else:
            prompt = self._tokens(self.context + tail)
        most = self.rng.randint(1, 499) if self.churn else MOST
        keys = block_keys(b"", prompt, BLOCK)  # the edge's work, not the engine's
        return Request(
            id=str(self.made), prompt=prompt, max_tokens=most, keys=keys, stop_ids=frozenset((0,))
        )

    def _submit(self) -> None:
        self.inbox.append(Submit(self.ready.popleft() if self.ready else self._request()))

    def stock(self, turns: int) -> None:
        """Make the requests that so many turns will want: the edge's work between timed blocks.

        Made between two turns, it would also throw the engine's state out of the caches.
        """
        wanted = int(turns * self.running / 250 * 1.5) + 8 if self.churn else 0
        while len(self.ready) < wanted:
            self.ready.append(self._request())

    def _fill_cache(self) -> None:
        """Leave `idle_blocks` cached blocks behind, of requests that have ended."""
        length = 32 * BLOCK
        for _ in range(self.idle_blocks // 32):
            self.made += 1
            request = Request(id=str(self.made), prompt=self._tokens(length), max_tokens=1)
            self.inbox.append(Submit(request))
            while self.inbox or self.state.requests:
                self.turn()

    def turn(self) -> float:
        """Take one turn with the results of the earliest step; returns its seconds."""
        events: list[Event] = [Tick(self.clock)]
        self.clock += 0.01
        if self.state.inflight:
            plan = self.plans.popleft()
            tokens = self.rng.choices(range(1, VOCAB), k=len(plan.rows))
            made = tuple((t,) * m for t, m in zip(tokens, plan.most, strict=True))
            events.append(Executed(plan.step, made))
        events += self.inbox
        self.inbox.clear()
        packed = tuple(events)
        begin = time.perf_counter()
        transition = step(self.config, self.state, packed)
        took = time.perf_counter() - begin
        self.state = transition.state
        for command in transition.commands:
            if isinstance(command, Execute):
                self.plans.append(command.plan)
            elif isinstance(command, Emit):
                for _ in command.finished:
                    if self.churn and not self.filling:
                        self._submit()
        return took


def one_pass() -> float:
    """Seconds of a fixed piece of Python: twenty passes over a column of 1,024 numbers.

    The yardstick of a shared machine: taken beside each case, so that a slow minute shows.
    """
    column = tuple(range(1000, 2024))
    begin = time.perf_counter()
    for _ in range(20):
        column = tuple(map(add, column, column))
        column = tuple(range(1000, 2024))
    return time.perf_counter() - begin


def figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    p99 = ordered[int(len(ordered) * 0.99)]
    median = statistics.median(ordered)
    return {"median_ms": median * 1e3, "p99_ms": p99 * 1e3, "p99_over_median": p99 / median}


def table(turns: int) -> Iterator[dict[str, object]]:
    """One row per case; the p99 of each includes every turn."""
    for running in (1, 64, 256, 1024):
        for churn in (False, True):
            for aligned in (False, True):
                with QuietCollector():
                    load = Load(running, churn=churn, aligned=aligned)
                    for _ in range(turns // 4):
                        load.turn()
                    times: list[float] = []
                    yard: list[float] = []
                    for _ in range(20):
                        load.stock(turns // 20)
                        times += [load.turn() for _ in range(turns // 20)]
                        yard.append(one_pass())
                    row = figures(times)
                    blocks = [times[i : i + turns // 20] for i in range(0, turns, turns // 20)]
                    middle = sorted(map(statistics.median, blocks))
                    row |= {"low_ms": middle[0] * 1e3, "high_ms": middle[-1] * 1e3}
                    row["yardstick_ms"] = statistics.median(yard) * 1e3
                yield {"running": running, "churn": churn, "aligned": aligned, **row}


def paired(pair: list[Load], turns: int) -> dict[str, float]:
    """Medians of two workloads that take turns, in blocks, and their ratio."""
    one, other = pair
    with QuietCollector():
        a: list[float] = []
        b: list[float] = []
        ratios = []
        for _ in range(20):
            one.stock(turns // 20)
            other.stock(turns // 20)
            block_a = [one.turn() for _ in range(turns // 20)]
            block_b = [other.turn() for _ in range(turns // 20)]
            ratios.append(statistics.median(block_b) / statistics.median(block_a))
            a += block_a
            b += block_b
    return {
        "first_ms": statistics.median(a) * 1e3,
        "second_ms": statistics.median(b) * 1e3,
        "ratio": statistics.median(b) / statistics.median(a),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def ratios(turns: int) -> Iterator[dict[str, object]]:
    for running in (64, 256):
        for churn in (False, True):
            pair = [Load(running, context=c, churn=churn, shared=churn) for c in (1024, 32768)]
            what = "context 1k -> 32k" + (" (one shared document)" if churn else "")
            yield {"what": what, "running": running, "churn": churn, **paired(pair, turns)}
            pair = [Load(running, churn=churn, idle_blocks=n) for n in (4096, 65536)]
            what = "idle cached blocks 4k -> 64k"
            yield {"what": what, "running": running, "churn": churn, **paired(pair, turns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=2000, help="timed turns of each case")
    parser.add_argument("--part", choices=("all", "table", "ratios"), default="all")
    args = parser.parse_args()
    rows, pairs = [], []
    if args.part != "ratios":
        print(
            "running churn aligned   median (of 20 blocks: low, high)    p99  p99/median  yardstick"
        )
        for row in table(args.turns):
            rows.append(row)
            print(
                f"{row['running']:7} {row['churn']!s:5} {row['aligned']!s:7} "
                f"{row['median_ms']:8.3f} ({row['low_ms']:.3f}, {row['high_ms']:.3f})"
                f"{row['p99_ms']:18.3f} {row['p99_over_median']:10.2f} {row['yardstick_ms']:10.2f}",
                flush=True,
            )
    if args.part != "table":
        for pair in ratios(args.turns):
            pairs.append(pair)
            print(
                f"{pair['what']:38} running {pair['running']} churn {pair['churn']!s:5} "
                f"{pair['first_ms']:.3f} -> {pair['second_ms']:.3f} ms, ratio {pair['ratio']:.2f}",
                flush=True,
            )
    if args.part == "all":
        write(
            "core_step", {"turns": args.turns, "block_size": BLOCK, "table": rows, "pairs": pairs}
        )


if __name__ == "__main__":
    main()
