"""How much of the prompts of conversations is hit where layers keep a state: the engine's
own decisions on a virtual clock, without a model.

Sizes are those of Qwen3-Next-80B-A3B: a block of 64 tokens of its 12 attention layers is
a page, and the float32 state of its 36 recurrent layers 50 of them. The pool holds the
keys and values of a part of the conversations: of the tokens that a prompt has in common
with the turn before, the share is shown that is hit. With `--state-pages 0`, the same
without recurrent layers.
"""

import argparse
from collections.abc import Mapping
from heapq import heappop, heappush
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
DECODE: Final = ((8, 6e-3), (64, 12e-3), (256, 20e-3))
COST: Final = CostModel(name="80B", decode=DECODE, mixed=20e-3, token=1.2e-5)
OPTIONS: Final[Mapping[str, Any]] = {
    "--budget": 8192,
    "--state-pages": 50,
    "--stride": StateKeeping().stride_blocks,
    "--max-share": StateKeeping().max_share,
    "--conversations": 128,
    "--turns": 10,
    "--first": 2000,  # tokens of a first question, on average,
    "--more": 600,  # of later ones,
    "--answer": 200,  # and of an answer
    "--holds": 1 / 3,  # of the blocks of all conversations at their ends
    "--rows": 64,
    "--think": 30.0,  # seconds between an answer and the next question, on average
    "--seed": 0,
}


@define
class Load:
    """Requests to come, and what became of their prompts."""

    args: argparse.Namespace
    rng: Random
    coming: list[tuple[float, str, Request]] = field(factory=list)  # a heap
    histories: dict[str, tuple[int, ...]] = field(factory=dict)  # by conversation
    turns: dict[str, int] = field(factory=dict)  # by conversation
    shared: dict[str, int] = field(factory=dict)  # by request: tokens that were before
    asked: dict[str, float] = field(factory=dict)  # by request: seconds
    hits: dict[str, int] = field(factory=dict)
    firsts: list[float] = field(factory=list)  # seconds to a first token

    def ask(self, time: float, request: Request, shared: int) -> None:
        """Have a request arrive."""
        self.shared[request.id], self.asked[request.id] = shared, time
        heappush(self.coming, (time, request.id, request))

    def next_turn(self, name: str, time: float) -> None:
        """Have the next turn of a conversation arrive."""
        turn = self.turns[name] = self.turns.get(name, -1) + 1
        before, size = self.histories.get(name, ()), self.rng.uniform(0.5, 1.5)
        fresh = int(size * (self.args.more if turn else self.args.first))
        prompt = before + tuple(self.rng.randrange(1, 10**6) for _ in range(fresh))
        self.histories[name] = prompt
        answer = int(self.rng.uniform(0.5, 1.5) * self.args.answer)
        request = Request(id=f"{name}.{turn}", prompt=prompt, max_tokens=answer)
        self.ask(time, request, len(before))

    def serve(self, num_blocks: int, rows: int) -> None:
        """Serve all requests."""
        args = self.args
        states = CacheGroup(state=True, pages=args.state_pages or 1)
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=65_536,
            max_num_seqs=rows,
            max_num_batched_tokens=args.budget,
            groups=(CacheGroup(), states)[: 1 + bool(args.state_pages)],
            states=StateKeeping(stride_blocks=args.stride, max_share=args.max_share),
        )
        start = initial(config)
        engine = SimulatedEngine(
            config, Simulated(), COST, start, 0.0, 0, step, Guesses()
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
        for emit in [c for c in turn.transition.commands if isinstance(c, Emit)]:
            for (name, _), tokens in zip(emit.ids, emit.tokens, strict=True):
                if tokens and name in self.asked:
                    self.firsts.append(now - self.asked.pop(name))
                if (conversation := name.split(".")[0]) in self.histories:
                    self.histories[conversation] += tokens
            for conversation in (done.id.split(".")[0] for done in emit.finished):
                if self.turns.get(conversation, inf) + 1 < self.args.turns:
                    pause = self.rng.expovariate(1 / self.args.think)
                    self.next_turn(conversation, now + pause)


def conversing(args: argparse.Namespace) -> dict[str, float]:
    """Conversations at once: what is hit of their prompts."""
    load = Load(args, Random(args.seed))
    for number in range(args.conversations):
        load.next_turn(f"c{number}", args.think * load.rng.random())
    tokens = args.first + (args.turns - 1) * args.more + args.turns * args.answer
    num_blocks = int(args.holds * args.conversations * tokens / BLOCK)
    load.serve(num_blocks, args.rows)
    firsts = sorted(load.firsts)
    figures = {
        "pages": num_blocks,
        "requests": len(load.hits),
        "hit share": round(sum(load.hits.values()) / sum(load.shared.values()), 3),
        "first token, median s": round(firsts[len(firsts) // 2], 3),
        "first token, p99 s": round(firsts[len(firsts) * 99 // 100], 3),
    }
    print(figures)
    return figures


if __name__ == "__main__":
    results.run("state_hits", conversing, OPTIONS)
