"""A small hostile world around the engine: requests, an oracle that executes, and an auditor.

`World` offers macro actions (a burst of requests, k turns, a late result, a cancel, a failed step)
to the Hypothesis machine and to the swarm alike. After every turn it checks the state and the
turn; at a sample's end it compares what was emitted with `reference`.
"""

import math
from collections import deque
from collections.abc import Iterator
from random import Random
from typing import Any

from attrs import define, evolve, field, frozen

from minfer.blocks import outside
from minfer.config import EngineConfig
from minfer.engine import step
from minfer.invariants import check
from minfer.keys import root_key
from minfer.ledger import Ledger, Watched
from minfer.messages import (
    Cancel,
    Emit,
    Event,
    Execute,
    Executed,
    Failed,
    Finish,
    Finished,
    Preempted,
    Submit,
    Tick,
)
from minfer.oracle import START, Oracle, Row
from minfer.policies import Ageing, Deadline, Fair, Priority, Shortest, Static, Window
from minfer.policy import FirstCome, Load, Policy
from minfer.request import Request, SamplingParams
from minfer.sequence import SampleId
from minfer.state import EngineState, Transition, initial

VOCAB = 40


@frozen
class Sparing(FirstCome):
    """Takes fewer tokens a step the more wait."""

    def budget(self, _: Any, load: Load) -> int:
        return max(1, load.budget // (1 + load.waiting))


POLICIES: tuple[Policy, ...] = (
    FirstCome(), FirstCome(), FirstCome(), Priority(), Ageing(4.0, 2), Deadline(9.0), Shortest(0.3),
    Fair(), Window(4.0, 2, wait=1.5, fill=3, urgent=0), Static(2),
)  # fmt: skip


def reference(
    request: Request, sample: int, block_size: int, vocab: int, limit: int, window: int = 0
) -> list[int]:
    """What a sample must yield, computed alone and without blocks.

    `limit` bounds prompt and output together.
    """
    digests: list[int] = []
    noise = (request.seed, sample) if request.sampling.temperature > 0 else ()
    tokens, here, out = [*request.prompt, *request.output], START, []
    for position in range(min(len(request.prompt) + request.max_tokens, limit) - 1):
        here = here if position % block_size else START
        seen = hash(tuple(digests[outside(position, window, block_size) :]))
        here = hash((here, tokens[position], position, seen))  # the block's digest, one slot on
        if (position + 1) % block_size == 0:
            digests.append(here)
        if position + 1 == len(tokens):
            tokens.append(hash((seen, here, position + 1, *noise)) % vocab)
            out.append(tokens[-1])
            if tokens[-1] in request.stop_ids:
                break
    return out


def tiny_config(rng: Random) -> EngineConfig:
    """Pools so small, and budgets so tight, that everything happens at once."""
    seqs = rng.randint(1, 6)
    size = rng.choice((1, 2, 4, 5))
    return EngineConfig(
        num_blocks=rng.randint(4, 40),
        block_size=size,
        max_model_len=rng.choice((16, 32, 48)),
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, rng.choice((1, 2, 3, 5, 8, 16, 64))),
        vocab_size=VOCAB,
        depth=rng.choice((1, 2, 2, 3)),
        max_repeat=rng.choice((1, 1, 2, 5)),
        max_failures=rng.choice((2, 3)),
        watermark=rng.choice((0, 0, 1, 2)),
        policy=rng.choice((*POLICIES, Sparing())),
        window=rng.choice((0, 0, 0, 2, 3, 6, 9, 14)),
    )


class Shy(Oracle):
    """An oracle whose rows of repeated plans yield fewer tokens than they may."""

    def __init__(self, rng: Random, block_size: int, vocab: int, window: int) -> None:
        super().__init__(block_size, vocab, window)
        self.rng = rng

    def _row(
        self, row: Row, fill: tuple[int, ...] | None, start: int, yields: int
    ) -> Iterator[int]:
        return super()._row(row, fill, start, self.rng.randint(1, yields) if yields > 1 else yields)


@define
class World:
    """The engine, its oracle, and everything that was ever said about each sample."""

    config: EngineConfig
    rng: Random
    variable: bool = False  # rows of repeated plans yield fewer tokens than they may
    state: EngineState = field(init=False)
    oracle: Oracle = field(init=False)
    ledger: Ledger = field(init=False)
    watched: EngineConfig = field(init=False)  # `config`, and what its policy answers: `budgets`
    budgets: list[int] = field(init=False)
    inbox: list[Event] = field(factory=list)
    requests: dict[str, Request] = field(factory=dict)
    out: dict[SampleId, list[int]] = field(factory=dict)
    ended: dict[SampleId, Finished] = field(factory=dict)
    cut: set[SampleId] = field(factory=set)
    past: deque[tuple[int, ...]] = field(factory=lambda: deque(maxlen=8))  # prompts to share
    clock: float = 0.0
    turns: int = 0
    preempted: int = 0
    audit: bool = True
    poisonous: float = 0.0  # share of requests whose every step fails
    poison: set[str] = field(factory=set)
    faults: int = 0  # steps that failed or were garbled for no fault of a request

    def __attrs_post_init__(self) -> None:
        self.state = initial(self.config)
        self.ledger = Ledger(self.config, self.state)
        policy: Any = Watched(self.config.policy)
        self.budgets, self.watched = policy.budgets, evolve(self.config, policy=policy)
        sizes = self.config.block_size, VOCAB, self.config.window
        self.oracle = Shy(Random(self.rng.random()), *sizes) if self.variable else Oracle(*sizes)

    # --- actions ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.inbox.append(Submit(request))

    def burst(self, count: int) -> None:
        """Some requests arrive: related prompts, lengths at block ends, several samples."""
        for _ in range(count):
            self.submit(self.some_request())

    def some_request(self) -> Request:
        rng, size = self.rng, self.config.block_size
        length = max(1, rng.randint(0, 4) * size + rng.choice((-1, 0, 0, 1, 2)))
        prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
        if self.past and rng.random() < 0.6:
            base = rng.choice(self.past)
            keep = rng.choice((len(base), len(base) // size * size, rng.randint(1, len(base))))
            prompt = base[:keep] + prompt[: rng.randint(0, len(prompt))]
        if prompt:
            self.past.append(prompt)
        name, salt = f"r{len(self.requests)}", rng.choice((b"", b"other"))
        if rng.random() < self.poisonous:
            self.poison.add(name)
        return Request(
            id=name,
            prompt=prompt,
            max_tokens=rng.choice((1, 2, 3, size, 2 * size, 12, 40)),
            stop_ids=frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 1, 2)))),
            n=rng.choice((1, 1, 1, 2, 4)),
            seed=rng.randrange(4),
            sampling=SamplingParams(temperature=rng.choice((0.0, 1.0))),
            priority=rng.randint(0, 2),
            client=rng.choice(("", "a", "b")),
            deadline=rng.choice((math.inf, 2.0, 20.0)),
            root=root_key(b"tests", salt),
        )

    def cancel_some(self) -> None:
        """Cancel any request: waiting, running, ended or unknown."""
        ran = [name for name, _ in self.state.running.ids]  # once for each sample
        names = [*sorted(self.state.requests), *ran, *list(self.requests)[-3:], "nobody"]
        self.inbox.append(Cancel(self.rng.choice(names)))

    def finish_some(self) -> None:
        """The text layer ends a sample at some length."""
        if self.out:
            name, sample = self.rng.choice(list(self.out))
            length = self.rng.randint(0, len(self.out[name, sample]) + 1)
            self.cut.add((name, sample))
            self.inbox.append(Finish(name, sample, length))

    def turn(self) -> None:
        """One turn in which the earliest step in flight completes, or fails if it is poisoned."""
        if self._poisoned():
            return self._take((self.oracle.fail("poison", halfway=self.rng.random() < 0.5),))
        return self._take((self.oracle.collect(),) if self.oracle.plans else ())

    def late(self) -> None:
        """One turn in which no result has come yet."""
        self._take(())

    def fail(self) -> None:
        """One turn in which the earliest step fails, having written something or nothing."""
        if not self.oracle.plans:
            return self.late()
        self.faults += 1
        return self._take((self.oracle.fail("boom", halfway=self.rng.random() < 0.5),))

    def _poisoned(self) -> bool:
        """Whether a sequence whose every step fails has a row in the earliest step in flight."""
        run = self.state.running
        front = self.oracle.plans[0].gens if self.oracle.plans else ()
        bad = (gen for gen, (name, _) in zip(run.gens, run.ids, strict=True) if name in self.poison)
        return any(gen in front for gen in bad)

    def garble(self) -> None:
        """One turn with results that cannot be: the step counts as failed."""
        if not self.oracle.plans or self._poisoned():
            return self.turn()
        self.faults += 1
        done = self.oracle.collect()
        assert isinstance(done, Executed)
        wrong: list[Event] = [
            Executed(done.step, (*done.yields, (1,))),
            Executed(done.step, tuple((*y, *[1] * 9) for y in done.yields)),
            Executed(done.step, tuple((VOCAB,) * len(y) for y in done.yields)),
            Executed(done.step, tuple((-1,) * len(y) for y in done.yields)),
            Failed(done.step, "x" * 1000),
        ]
        if self.state.inflight[1:]:
            wrong += [Executed(self.state.inflight[-1].step, done.yields)] * 3
        event = self.rng.choice(wrong)
        if event != done:  # a plan of rows that yield nothing cannot be garbled by more tokens
            self.oracle.plans.clear()
            for index in {row for plan in self.state.inflight for row in plan.rows}:
                if index in self.oracle.rows:
                    self.oracle.rows[index].last = self.oracle.rows[index].next = -1
        return self._take((event,))

    def noise(self) -> None:
        """Results and failures of steps that nobody knows."""
        known = self.state.next_step
        self.inbox.append(self.rng.choice((Executed(known + 3, ()), Failed(known + 3), Tick(-1.0))))

    def drain(self) -> None:
        """No more arrivals and no more faults: everything must end, in bounded time."""
        work = sum(
            (len(r.prompt) + min(r.max_tokens, self.config.max_model_len)) * r.n
            for r in self.requests.values()
            if r.id in self.state.requests or any(Submit(r) == e for e in self.inbox)
        )
        work += sum(5 * self.requests[name].n for name in self.poison)
        bound = self.turns + 50 + 4 * work
        while self.state.requests or self.state.inflight or self.inbox:
            assert self.turns < bound, f"not drained: {self.state.held}"
            self.turn()
        check(self.config, self.state)
        assert self.state.blocks.available == self.config.num_blocks
        lost = {(r.id, s) for r in self.requests.values() for s in range(r.n)} - set(self.ended)
        assert not lost, f"no terminal word about {lost}"

    # --- the auditor -----------------------------------------------------------------------------

    def _take(self, results: tuple[Event, ...]) -> None:
        self.turns += 1
        self.clock += self.rng.random()
        events = (Tick(self.clock), *results, *self.inbox)
        self.inbox.clear()
        self.budgets.clear()
        turn = step(self.watched, self.state, events)
        self.state = turn.state
        if self.audit:
            self.ledger.take(events, turn, self.budgets)
        self.preempted += sum(isinstance(r, Preempted) for r in turn.reasons)
        self._perform(turn)

    def _perform(self, turn: Transition) -> None:
        for command in turn.commands:
            if isinstance(command, Execute):
                self.oracle.launch(command.plan)
            elif isinstance(command, Emit):
                for name, tokens in zip(command.ids, command.tokens, strict=True):
                    assert not (tokens and name in self.ended), f"tokens of {name} after its end"
                    self.out.setdefault(name, []).extend(tokens)
                for done in command.finished:
                    self._end(done)

    def _end(self, done: Finished) -> None:
        name = (done.id, done.sample)
        assert name not in self.ended, f"{name} ended twice"
        self.ended[name] = done
        request, out = self.requests[done.id], self.out.pop(name, [])
        if done.reason == "rejected":
            assert not out
            assert done.error
            return
        if done.reason == "error" and not self.faults:
            assert done.id in self.poison, f"{name} is blamed for its neighbours"
        right = self.reference(request, done.sample)
        if done.reason in ("stop", "length") and name not in self.cut:
            assert out == right, f"{name}: {out} is not {right}"
            assert done.length == len(out), f"{name}: {done.length} tokens, {len(out)} emitted"
            stopped = out[-1] in request.stop_ids
            assert done.reason == ("stop" if stopped else "length")
        else:
            assert out == right[: len(out)], f"{name}: {out} does not begin {right}"
            assert done.length <= len(out)
        self.past.append(request.prompt + tuple(right[: done.length]))

    def reference(self, request: Request, sample: int) -> list[int]:
        own = self.config
        size, limit = own.block_size, own.max_model_len
        return reference(request, sample, size, VOCAB, limit, own.window)


def run_swarm(seed: int, turns: int) -> World:
    """One world under random fire for `turns` turns, healed and drained."""
    rng = Random(seed)
    world = World(tiny_config(rng), rng, variable=rng.random() < 0.3)
    world.poisonous = rng.choice((0.0, 0.1))
    # Swarm testing: each run leaves out some kinds of trouble, so that others get further.
    trouble = [
        a
        for a, share in (
            (world.fail, 0.5),
            (world.garble, 0.3),
            (world.cancel_some, 0.7),
            (world.finish_some, 0.4),
            (world.late, 0.6),
            (world.noise, 0.3),
        )
        if rng.random() < share
    ]
    rate = rng.choice((0.05, 0.2, 0.5))
    ends = world.turns + turns
    while world.turns < ends:
        if rng.random() < rate and len(world.state.waiting) < 12:
            world.burst(rng.choice((1, 1, 2, 5)))
        if trouble and rng.random() < 0.15:
            rng.choice(trouble)()
        world.turn()
    world.drain()
    return world


__all__ = ["VOCAB", "World", "evolve", "run_swarm", "tiny_config"]
