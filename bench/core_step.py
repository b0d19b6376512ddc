"""Cost of one turn of the core (commit and plan), without any executor.

The median and the 99th percentile of a turn at 1 to 1,024 running sequences, in a steady
decode and with churn (outputs of 250 tokens on average, who has ended is replaced), with
block ends spread over the steps and all at the same step; the same for 256 sequences of a
model with two groups of layers, seven pages a block; and that neither context length nor
a pool full of idle cached blocks makes a turn dearer (two engines take turns, so that the
machine's noise hits both). 256 sequences of a model with recurrent layers, whose states
are saved and kept, take turns with those of one without; 256 that have 32 adapters, with
256 that have none. A steady decode with a host
tier, in which all is stored, takes turns with one without, at several lengths of context:
there a turn's cost is the mean, as few of them store. Results are fed back as an executor
would at depth 2; making them up is not timed. Times are the processor's: the core waits
for nothing, and what else the machine does is not its cost. `--before TREE` compares this
tree's core with another's, in two processes that take turns.
"""

import argparse
import random
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from statistics import mean, median
from typing import Any

from attrs import evolve

from bench.results import percentiles, run, show, spread
from bench.trees import HERE, EngineWorker, serve
from minfer.blocks.keys import block_keys
from minfer.effects.execution.dry_executor import DryExecutor
from minfer.effects.live.engine.interpreter import paused_collector
from minfer.engine import step
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Emit, Event, Executed
from minfer.records.request import Request
from minfer.records.state import EngineState, Transition, Turn, initial
from minfer.records.tiers import HostTier
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import ArrivalQueue, Simulation

BLOCK = 64
VOCAB = 32_000
MAX_OUTPUT_TOKENS = 8192  # output tokens of a steady decode: more than a run takes turns
BLOCKS_PER_CASE = 20  # blocks of turns that a case is measured in
# Where two trees take turns. A process is up to 5 % slower than its twin as its memory
# happens to lie, so the same is asked of fresh ones again and again.
LIVES = 16
# Gemma 3 4B: six pages a block in its sliding layers, one in the others.
GEMMA = (CacheGroup(window=1024, pages=6), CacheGroup())
# Qwen3-Next 80B: the state of its recurrent layers, in float32, is as large as 50 blocks.
QWEN3_NEXT = (CacheGroup(), CacheGroup(state=True, pages=50))
PAIRS = 14  # blocks of a life
COST = CostModel(name="any", decode=((1, 0.01),), mixed=0.01, token=0.0)


class MadeUp(DryExecutor):
    """An executor of random tokens: quicker than a passage, and with less
    memory in use.
    """

    def collect(self) -> Executed:
        plan = self.plans.popleft()
        tokens = random.choices(range(1, VOCAB), k=len(plan.rows))
        return Executed(
            plan.step,
            tuple((t,) * m for t, m in zip(tokens, plan.max_sampled_tokens, strict=True)),
        )


class Load:
    """A workload that keeps `running` sequences busy, with prompts of `context` tokens.

    `aligned`: block ends come at the same step. `shared`: prompts are one document, all
    but the last block. `idle_blocks` cached blocks of requests that have ended are there
    from the start. `groups` are those of the model's layers. `host`: with host memory,
    which has room for all blocks; a transfer ends before the next turn. `adapters`: how
    many adapters the requests have in turn, all of them on the device.
    """

    def __init__(
        self,
        running: int,
        *,
        context: int = 1024,
        churn: bool = False,
        aligned: bool = False,
        idle_blocks: int = 0,
        shared: bool = False,
        block_size: int = BLOCK,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        host: bool = False,
        adapters: int = 0,
    ) -> None:
        per_seq = (context + (512 if churn else MAX_OUTPUT_TOKENS)) // block_size + 2
        config = EngineConfig(
            num_blocks=sum(group.pages for group in groups)
            * (running * per_seq + idle_blocks + context // block_size + 64),
            groups=groups,
            block_size=block_size,
            max_model_len=context + 2 * MAX_OUTPUT_TOKENS,
            max_num_seqs=running,
            max_num_batched_tokens=max(8192, running + context),
            vocab_size=VOCAB,
            adapter_slots=adapters,
        )
        if host:
            tier = HostTier(
                pages=config.num_blocks, page_seconds=COST.decode[0][1] / 1000
            )
            config = evolve(config, host=tier)
        self.block_size, self.adapters = block_size, adapters
        self.running, self.churn, self.rng, self.made = (
            running,
            churn,
            random.Random(0),
            0,
        )
        self.lengths = range(context, context + (1 if aligned else BLOCK))
        self.document = self.tokens(context - BLOCK) if shared else ()
        self.ready, self.took, executor = deque[Request](), list[float](), MadeUp([[0]])
        # One after the other.
        idle = ((float(number), self.idle(number)) for number in range(idle_blocks // 32))
        before, state = Simulation(config, executor, COST, idle).turns(), initial(config)
        for turn in before:
            state = turn.transition.state
        self.coming = ArrivalQueue((state.time, self.next()) for _ in range(running))
        engine = Simulation(
            config, executor, COST, self.coming, state, state.time, step=self.step
        )
        self.turns = self.refilled(engine.turns())
        while len(next(self.turns).transition.state.running) < running:
            pass
        self.block(8)  # the last prompts end

    def refilled(self, turns: Iterator[Turn]) -> Iterator[Turn]:
        """Turns, after which who has ended is replaced."""
        for turn in turns:
            for emit in turn.transition.commands:
                if isinstance(emit, Emit):
                    self.coming += [(0.0, self.next()) for _ in emit.finished]
            yield turn

    def step(
        self, config: EngineConfig, state: EngineState, events: tuple[Event, ...]
    ) -> Transition:
        """The core's step, timed."""
        begin = time.thread_time()
        transition = step(config, state, events)
        self.took.append(1e3 * (time.thread_time() - begin))
        return transition

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(1, VOCAB), k=count))

    def idle(self, number: int) -> Request:
        return Request(id=f"idle {number}", prompt=self.tokens(32 * BLOCK), max_tokens=1)

    def request(self) -> Request:
        self.made += 1
        length = self.rng.choice(self.lengths) - len(self.document)
        prompt = self.document + self.tokens(length)
        adapter = f"{self.made % self.adapters:02x}" if self.adapters else ""
        root = adapter.encode()
        return Request(
            id=str(self.made),
            prompt=prompt,
            stop_ids=frozenset((0,)),
            max_tokens=self.rng.randint(1, 499) if self.churn else MAX_OUTPUT_TOKENS,
            adapter=adapter,
            root=root,
            # the edge's work, not the engine's
            keys=block_keys(root, prompt, self.block_size),
        )

    def next(self) -> Request:
        return self.ready.popleft() if self.ready else self.request()

    def settle(self) -> None:
        """Take turns until all that the prompts left is stored."""
        for turn in self.turns:
            if not turn.transition.state.tiers.host_queue:
                return

    def block(self, turns: int) -> list[float]:
        """Milliseconds of each turn of a block of them.

        The requests that will be wanted are made before: it is the edge's work, and
        between two turns it would throw the engine's state out of the caches.
        """
        wanted = turns * self.running // 160 + 8 if self.churn else 0
        self.ready += [self.request() for _ in range(wanted - len(self.ready))]
        self.took.clear()
        deque(islice(self.turns, turns), maxlen=0)
        return [*self.took]


def measure_solo(
    running: int, churn: bool, aligned: bool, turns: int, **settings: Any
) -> dict[str, Any]:
    """A turn's cost; the p99 includes every turn, low and high are medians of blocks."""
    load = Load(running, churn=churn, aligned=aligned, **settings)
    load.block(turns // 4)
    blocks = [load.block(turns // BLOCKS_PER_CASE) for _ in range(BLOCKS_PER_CASE)]
    turn_ms, middle = percentiles([*chain(*blocks)]), [*map(median, blocks)]
    return {
        "running": running,
        "churn": churn,
        "aligned": aligned,
        "pages": sum(group.pages for group in settings.get("groups", (CacheGroup(),))),
        "median_ms": turn_ms["p50"],
        "p99_ms": turn_ms["p99"],
        "p99_over_median": turn_ms["p99"] / turn_ms["p50"],
        "low_ms": min(middle),
        "high_ms": max(middle),
    }


def paired(name: str, loads: list[Load], turns: int) -> dict[str, Any]:
    """Medians of two workloads that take turns, in blocks, and their ratio."""
    pairs = [
        [load.block(turns // BLOCKS_PER_CASE) for load in loads]
        for _ in range(BLOCKS_PER_CASE)
    ]
    first, second = (median(chain(*blocks)) for blocks in zip(*pairs, strict=True))
    ratios = [median(b) / median(a) for a, b in pairs]
    return {
        "what": name,
        "running": loads[0].running,
        "churn": loads[0].churn,
        "first_ms": first,
        "second_ms": second,
        "ratio": second / first,
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def with_host_tier(running: int, context: int, turns: int) -> dict[str, Any]:
    """The mean turn of a steady decode without a host tier and with one, in blocks that
    take turns, and their ratio.
    """
    loads = [Load(running, context=context, host=host) for host in (False, True)]
    for load in loads:
        load.settle()
        load.block(turns // 4)
    pairs = list[tuple[float, float]]()
    for number in range(BLOCKS_PER_CASE):
        order = (0, 1) if number % 2 else (1, 0)  # neither is always the second
        took = {
            index: mean(loads[index].block(turns // BLOCKS_PER_CASE)) for index in order
        }
        pairs.append((took[0], took[1]))
    return {
        "running": running,
        "context": context,
        "without_ms": median([without for without, _ in pairs]),
        "with_ms": median([tiered for _, tiered in pairs]),
        "ratio": spread([tiered / without for without, tiered in pairs]),
    }


class Blocks:
    """A worker's workloads, a block of turns at a time."""

    def __init__(self) -> None:
        self.loads: dict[tuple[int, bool], Load] = {}

    def __call__(self, running: int, churn: bool, turns: int) -> list[float]:
        load = self.loads.get((running, churn)) or Load(running, churn=churn)
        self.loads[running, churn] = load
        return load.block(turns)


def against(before: Path, turns: int) -> list[dict[str, Any]]:
    """This tree's core and another's, in pairs of processes that take turns: how many
    times faster, once by the median turn and once by all of them.
    """
    results = []
    for running, churn in product((256, 1024), (False, True)):
        case = {"running": running, "churn": churn}
        lives = [_life(before, case, turns) for _ in range(LIVES)]
        results.append(
            {
                **case,
                "before_ms": median([life["before_ms"] for life in lives]),
                "now_ms": median([life["now_ms"] for life in lives]),
                "faster": spread([life["by_median"] for life in lives]),
                "faster_in_all": spread([life["by_sum"] for life in lives]),
            }
        )
        show(results[-1])
    return results


def _life(before: Path, case: dict[str, Any], turns: int) -> dict[str, float]:
    """One pair of processes: what a turn takes in each, and the median ratios."""
    turns_per_block = max(1, turns // PAIRS // 8)
    with (
        EngineWorker(before, "bench.core_step") as old,
        EngineWorker(HERE, "bench.core_step") as new,
    ):
        workers = (old, new)
        for worker in workers:
            worker("block", **case, turns=turns // 20)
        pairs = []
        for number in range(PAIRS):
            order = workers[:: 1 if number % 2 else -1]  # neither is always the second
            blocks = {
                worker: worker("block", **case, turns=turns_per_block) for worker in order
            }
            pairs.append([blocks[worker] for worker in workers])
    return {
        "before_ms": median([median(earlier) for earlier, _ in pairs]),
        "now_ms": median([median(now) for _, now in pairs]),
        "by_median": median([median(earlier) / median(now) for earlier, now in pairs]),
        "by_sum": median([sum(earlier) / sum(now) for earlier, now in pairs]),
    }


def sizes_table(turns: int) -> list[dict[str, Any]]:
    """A turn's cost at several numbers of sequences, and with two groups of layers."""
    table = list[dict[str, Any]]()
    for running, churn, aligned in product(
        (1, 64, 256, 1024), (False, True), (False, True)
    ):
        with paused_collector():
            table.append(measure_solo(running, churn, aligned, turns))
        show(table[-1])
    for churn in (False, True):
        with paused_collector():
            table.append(measure_solo(256, churn, False, turns, groups=GEMMA))
        show(table[-1])
    return table


def context_ratios(turns: int) -> list[dict[str, Any]]:
    """How a turn's cost depends on the context and on idle cached blocks."""
    pairs = list[dict[str, Any]]()
    for running, churn in product((64, 256), (False, True)):
        contexts = "context 1k -> 32k" + (" (one shared document)" if churn else "")
        cases: dict[str, list[dict[str, Any]]] = {
            contexts: [{"context": length, "shared": churn} for length in (1024, 32768)],
            "idle cached blocks 4k -> 64k": [{"idle_blocks": n} for n in (4096, 65536)],
        }
        for name, kinds in cases.items():
            with paused_collector():
                loads = [Load(running, churn=churn, **kind) for kind in kinds]
                pairs.append(paired(name, loads, turns))
            show(pairs[-1])
    return pairs


def with_states(turns: int) -> list[dict[str, Any]]:
    """A turn without recurrent layers, and one with states that are saved and kept."""
    pairs = list[dict[str, Any]]()
    for churn in (False, True):
        with paused_collector():
            loads = [Load(256, churn=churn)]
            loads.append(Load(256, churn=churn, groups=QWEN3_NEXT))
            pairs.append(paired("states of recurrent layers", loads, turns))
        show(pairs[-1])
    return pairs


def with_adapters(turns: int) -> list[dict[str, Any]]:
    """A turn of requests without adapters, and one with 32 that are on the device."""
    pairs = list[dict[str, Any]]()
    for churn in (False, True):
        with paused_collector():
            loads = [Load(256, churn=churn, adapters=count) for count in (0, 32)]
            pairs.append(paired("32 adapters", loads, turns))
        show(pairs[-1])
    return pairs


def tier_ratios(turns: int) -> list[dict[str, Any]]:
    """What host memory under the pool adds to a turn."""
    tiers = list[dict[str, Any]]()
    for running, context in product((16, 256), (1024, 8192, 32768)):
        with paused_collector():
            tiers.append(with_host_tier(running, context, turns))
        show(tiers[-1])
    return tiers


PARTS = {
    "table": sizes_table,
    "pairs": context_ratios,
    "states": with_states,
    "adapters": with_adapters,
    "host_tier": tier_ratios,
}


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    if args.serve:
        with paused_collector():
            serve({"block": Blocks()})
        return None
    results: dict[str, Any] = {"turns": args.turns, "block_size": BLOCK}
    if args.before is not None:
        return results | {"against": against(args.before, args.turns)}
    parts = PARTS if args.part == "all" else [args.part]
    return results | {part: PARTS[part](args.turns) for part in parts}


if __name__ == "__main__":
    run(
        "core_step",
        measure,
        {
            "--turns": {"type": int, "default": 2000, "help": "timed turns of each case"},
            "--part": {
                "choices": ("all", *PARTS),
                "default": "all",
                "help": "use a --name for one of them",
            },
            "--before": {
                "type": Path,
                "help": "another tree, compared with this one; use a --name",
            },
            "--serve": {"action": "store_true", "help": argparse.SUPPRESS},
        },
    )
