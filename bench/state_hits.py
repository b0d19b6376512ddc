"""How much of prompts is hit where layers keep a state: the engine's own decisions on a
virtual clock, without a model.

Sizes are those of Qwen3-Next-80B-A3B: a block of 64 tokens of its 12 attention layers
is a page, and the float32 state of its 36 recurrent layers 50 of them. First, prompts
that share a number of tokens come one after another: the share of these that is hit.
Then conversations run at once in a pool that holds a part of them: the tokens of their
prompts that are hit, of all and of those that they had before.
"""

import argparse
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any, Final

from attrs import define, field

from bench import results
from minfer.engine import step
from minfer.records.config import CacheGroup, EngineConfig
from minfer.records.messages import Admitted, Emit, Event, Submit
from minfer.records.request import Request
from minfer.records.state import Turn, initial
from minfer.records.state_keeping import StateKeeping
from minfer.simulation.cost import CostModel
from minfer.simulation.guesses import Guesses
from minfer.simulation.simulate import Simulated
from minfer.simulation.simulated_engine import SimulatedEngine

BLOCK: Final = 64
SHARED: Final = tuple((tokens,) * 6 for tokens in (512, 1536, 3072, 6144))
VARYING: Final = (5120, 4992, 5056, 5120, 4928, 5056, 4992, 5120)
COST: Final = CostModel(
    name="80B with 3B active on one H200",
    decode=((8, 6e-3), (64, 12e-3), (256, 20e-3)),
    mixed=20e-3,
    token=1.2e-5,
    sequence=2e-5,
)
OPTIONS: Final[Mapping[str, Any]] = {
    "--budget": 8192,
    "--state-pages": 50,
    "--stride": StateKeeping().stride_blocks,
    "--max-share": StateKeeping().max_share,
    "--conversations": 128,
    "--turns": 10,
    "--holds": 1 / 3,  # of the blocks of all conversations at their ends
    "--rows": 16,
    "--think": 2.0,  # seconds between an answer and the next turn, on average
    "--seed": 0,
}


@define
class Load:
    """Requests to come, and what became of their prompts."""

    args: argparse.Namespace
    rng: Random
    coming: list[tuple[float, int, Request]] = field(factory=list)
    numbers: Iterator[int] = field(factory=count)
    # By conversation: its tokens, and its turn.
    histories: dict[str, tuple[int, ...]] = field(factory=dict)
    turns: dict[str, int] = field(factory=dict)
    shared: dict[str, int] = field(factory=dict)  # by request: tokens that were before
    asked: dict[str, float] = field(factory=dict)  # by request: seconds
    hits: dict[str, int] = field(factory=dict)
    firsts: list[float] = field(factory=list)  # seconds to a first token

    def ask(self, time: float, request: Request, shared: int) -> None:
        """Have a request arrive."""
        self.shared[request.id], self.asked[request.id] = shared, time
        heappush(self.coming, (time, next(self.numbers), request))

    def next_turn(self, name: str, time: float) -> None:
        """Have the next turn of a conversation arrive."""
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        before = self.histories.get(name, ())
        fresh = self.rng.randint(100, 400) if turn else self.rng.randint(900, 1100)
        prompt = before + tuple(self.rng.randrange(1, 10**6) for _ in range(fresh))
        self.histories[name] = prompt
        answer = self.rng.randint(60, 300)
        request = Request(id=f"{name}.{turn}", prompt=prompt, max_tokens=answer)
        self.ask(time, request, len(before))

    def serve(self, num_blocks: int, rows: int) -> None:
        """Serve all requests."""
        groups = (
            (CacheGroup(), CacheGroup(state=True, pages=self.args.state_pages))
            if self.args.state_pages
            else (CacheGroup(),)
        )
        keeping = StateKeeping(
            stride_blocks=self.args.stride, max_share=self.args.max_share
        )
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=65_536,
            max_num_seqs=rows,
            max_num_batched_tokens=self.args.budget,
            groups=groups,
            states=keeping,
        )
        engine = SimulatedEngine(
            config, Simulated(), COST, initial(config), 0.0, 0, step, Guesses()
        )
        while (now := engine.due(self.coming[0][0] if self.coming else inf)) < inf:
            arrived = list[Event]()
            while self.coming and self.coming[0][0] <= now:
                arrived.append(Submit(heappop(self.coming)[2]))
            turn = engine.take(now, arrived)
            self.read(turn)
            engine.launch(turn)

    def read(self, turn: Turn) -> None:
        """Note hits and first tokens; conversations go on."""
        now = turn.transition.state.time
        for reason in turn.transition.reasons:
            if isinstance(reason, Admitted):
                self.hits.setdefault(reason.id, reason.hit)
        for emit in turn.transition.commands:
            if not isinstance(emit, Emit):
                continue
            for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens and name in self.asked:
                    self.firsts.append(now - self.asked.pop(name))
                if name.split(".")[0] in self.histories:
                    self.histories[name.split(".")[0]] += tokens
            for done in emit.finished:
                name = done.id.split(".")[0]
                if name in self.turns and self.turns[name] + 1 < self.args.turns:
                    self.next_turn(name, now + self.rng.expovariate(1 / self.args.think))


def sharing(args: argparse.Namespace, lengths: tuple[int, ...]) -> list[float]:
    """Prompts that share so many of their first tokens with the ones before: which share
    of these is hit, one after another.
    """
    load, base = Load(args, Random(args.seed)), tuple(range(max(lengths)))
    for number, length in enumerate((max(lengths), *lengths)):
        own = (load.rng.randrange(10**6, 10**7) for _ in range(load.rng.randint(99, 700)))
        prompt = base[:length] + tuple(own)
        request = Request(id=f"p{number}", prompt=prompt, max_tokens=40)
        load.ask(100.0 * number, request, length)
    load.serve(num_blocks=20_000, rows=8)
    return [round(load.hits[name] / load.shared[name], 3) for name in load.hits]


def conversing(args: argparse.Namespace) -> dict[str, Any]:
    """Conversations at once: what is hit of their prompts."""
    load = Load(args, Random(args.seed))
    for number in range(args.conversations):
        load.next_turn(f"c{number}", load.rng.random())
    # A conversation of ten turns has 1,000 + 9 x 250 + 10 x 180 tokens, on average.
    tokens = 1000 + (args.turns - 1) * 250 + args.turns * 180
    num_blocks = int(args.holds * args.conversations * tokens / BLOCK)
    load.serve(num_blocks, args.rows)
    prompts = sum(len(prompt) for prompt in load.histories.values())
    hits, had = sum(load.hits.values()), sum(load.shared.values())
    firsts = sorted(load.firsts)
    return {
        "pages": num_blocks,
        "requests": len(load.hits),
        "hit share of what they had": round(hits / had, 3),
        "hit share of prompts": round(hits / (had + prompts), 3),
        "first token, median s": round(firsts[len(firsts) // 2], 3),
        "first token, p99 s": round(firsts[len(firsts) * 99 // 100], 3),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    figures = {str(lengths[0]): sharing(args, lengths) for lengths in SHARED}
    figures["varying"] = sharing(args, VARYING)
    for name, hits in figures.items():
        print(f"{name:>8} shared tokens: {hits}")
    conversations = conversing(args)
    print(conversations)
    return {"sharing": figures, "conversations": conversations}


if __name__ == "__main__":
    results.run("state_hits", measure, OPTIONS)
