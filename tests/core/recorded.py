"""Runs of hostile worlds as turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.journal.codec import RECORDS
from minfer.journal.writing import as_written
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Event,
    Execute,
    Executed,
    Finish,
    Submit,
    Tick,
)
from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request
from minfer.records.state import EngineState, Turn, initial
from minfer.simulation.oracle import Oracle
from tests.core import world as worlds
from tests.core.tuned import sizes_now
from tests.core.world import VOCAB, Sparing, run_world, tiny_config


def recorded(seed: int, turns: int = 60) -> tuple[EngineConfig, list[Turn]]:
    """A swarm world's configuration, and its turns as a journal keeps them."""
    config, log = _ran(seed, turns, sizes_now())
    return config, [*log]


@lru_cache(maxsize=64)  # tests ask for the same few worlds again and again
def _ran(
    seed: int, turns: int, _: tuple[int, ...]
) -> tuple[EngineConfig, tuple[Turn, ...]]:
    with _watched() as log:
        world = run_world(seed, turns)
    return world.config, (*log,)


@contextmanager
def _watched() -> Iterator[list[Turn]]:
    """The turns of worlds that run meanwhile, as a journal keeps them."""
    log: list[Turn] = []

    def spy(config: EngineConfig, state: Any, events: Any) -> Any:
        written: Any = tuple(map(as_written, events))
        transition = step(config, state, tuple(map(_with_vectors, written, events)))
        log.append(Turn(len(log), state, written, transition))
        return transition

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "step", spy)
        yield log


def _with_vectors(written: Any, event: Any) -> Any:
    """An event as it is written, with what passes through and no journal keeps."""
    if isinstance(written, Executed) and written.yields == event.yields:
        return evolve(written, pooled=event.pooled)
    return written


def storm(seed: int, turns: int) -> tuple[EngineConfig, list[Turn]]:
    """A run in which everything meets in one turn, in any order.

    Few names for many requests: ids come again while they are served, in the turn in
    which they end, and after it. Requests have up to four samples, or output to go on
    from; results and failures stand anywhere among cancels, ends by the text layer and
    arrivals.
    """
    rng = Random(seed)
    config = tiny_config(rng)
    if rng.random() < 0.1:
        config = evolve(config, policy=Erratic())
    oracle = Oracle(config.block_size, VOCAB, config.groups)
    state, log, time = initial(config), list[Turn](), 0.0
    rate = rng.choice((0.3, 1.0, 2.0))
    failing, cancelling = rng.choice((0.0, 0.05, 0.2)), rng.choice((0.05, 0.2, 1.0))
    for number in range(turns):
        time += rng.random()
        events: list[Event] = []
        if oracle.plans and rng.random() < 0.9:
            failed = rng.random() < failing
            events.append(
                oracle.fail("boom", halfway=True) if failed else oracle.collect()
            )
        arrivals = round(rng.expovariate(1 / rate)) if len(state.waiting) < 12 else 0
        events += [Submit(_some_request(rng, config)) for _ in range(arrivals)]
        for _ in range(round(rng.expovariate(1 / cancelling))):
            names = [f"r{rng.randrange(9)}", *(name for name, _ in state.running.ids)]
            name = rng.choice(names)
            text = Finish(name, rng.randrange(4), rng.randrange(6))
            events.append(rng.choice((Cancel(name), text)))
        rng.shuffle(events)
        made = (Tick(time), *events)
        transition = step(config, state, made)
        log.append(Turn(number, state, made, transition))
        state = transition.state
        for command in transition.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
    return config, log


class Erratic(FirstCome):
    """A policy that, every third second, answers what is no answer or raises."""

    def budget(self, _: Any, load: Load) -> int:
        return load.budget if int(load.time) % 3 else int("no number")

    def victim(self, _: Any, ranks: tuple[Rank, ...]) -> int:
        return len(ranks) - 1 if len(ranks) % 3 else len(ranks)


RECORDS.update(
    {kind.__name__: kind for kind in (Erratic, Sparing)}
)  # journals may name them


def _some_request(rng: Random, config: EngineConfig) -> Request:
    """Prompts that begin alike; now and then one too long, or one that was
    interrupted.
    """
    length = rng.randint(1, 5 * config.block_size)
    common, own = rng.randrange(3), rng.randrange(VOCAB)
    prompt = tuple(common if at < length - 2 else own for at in range(length))
    return Request(
        id=f"r{rng.randrange(9)}",
        prompt=prompt,
        max_tokens=rng.choice((1, 6, 20, 40)),
        n=rng.choice((1, 2, 4)),
        seed=rng.randrange(4),
        priority=rng.randint(0, 2),
        output=rng.choice(((), (), (), (1,), (1, 2, 3, 4, 5))),
        stop_ids=frozenset({3}) if rng.random() < 0.3 else frozenset(),
    )


def mixed_ends(turns: list[Turn]) -> int:
    """Turns in which samples of one request end for different causes: what a fold must
    bear.
    """
    count = 0
    for turn in turns:
        emits = [one for one in turn.transition.commands if isinstance(one, Emit)]
        why: dict[str, set[str]] = {}
        for done in (done for emit in emits for done in emit.finished):
            why.setdefault(done.id, set()).add(done.reason)
        count += any(len(reasons - {"rejected"}) > 1 for reasons in why.values())
    return count


class Seen(list[Turn]):
    """Turns as a driver records them."""

    def __call__(self, turn: Turn) -> None:
        self.append(turn)

    def close(self, state: EngineState) -> None:
        pass
