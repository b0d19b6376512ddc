"""Turns that are wrong on purpose, for laws to bite."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from operator import sub
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.blocks.ownership import Blocks
from minfer.blocks.pool import Pool
from minfer.engine import step
from minfer.policies.builtin import Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Emit,
    Event,
    Execute,
    Failed,
    Finish,
    QueueBlocked,
    Submit,
    Tick,
)
from minfer.records.plan import Plan, SampleDeferred
from minfer.records.state import BlockedHead, EngineState, Transition, Turn, initial
from minfer.simulation.oracle import Oracle
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from minfer.values.log import Log
from tests.core.test_engine import CONFIG, Bench, ask


def busy(depth: int = 2) -> Bench:
    bench = Bench(evolve(CONFIG, depth=depth))
    bench.give(*(Submit(ask("x" * n, 9, 12)) for n in (1, 2, 3)))
    for _ in range(6):
        bench.turn()
    return bench


def crowded() -> Bench:
    """As `busy`, with two more in line."""
    bench = busy()
    bench.give(*(Submit(ask("y" * n, 30, 12)) for n in (1, 2)))
    return bench


def run_with(state: EngineState, **columns: Any) -> EngineState:
    return evolve(state, running=evolve(state.running, **columns))


def blocks_with(state: EngineState, **changes: Any) -> EngineState:
    of_pool = {name: value for name, value in changes.items() if hasattr(Pool, name)}
    of_prefix = {name: value for name, value in changes.items() if name not in of_pool}
    pool = evolve(state.blocks.pool, **of_pool)
    prefix = evolve(state.blocks.prefix, **of_prefix)
    return evolve(state, blocks=Blocks(pool, prefix))


def first_waits(state: EngineState, **changes: Any) -> EngineState:
    """With the first in line changed."""
    first = state.waiting.first()
    line = state.waiting.remove(first.place).insert(evolve(first, **changes))
    return evolve(state, waiting=line)


def played(config: EngineConfig, *script: tuple[Event | str, ...]) -> Iterator[Turn]:
    """Turns of an engine: each with the result of the earliest step, or as the script
    says.
    """
    state, oracle = (
        initial(config),
        Oracle(config.block_size, config.vocab_size, config.groups),
    )
    for number in range(80):
        reported: list[Event] = [Tick(float(number + 1))]
        for one in script[number] if number < len(script) else ():
            if isinstance(one, str):
                reported.append(oracle.fail(one, halfway=False))
            else:
                reported.append(one)
        if oracle.plans and not any(isinstance(one, Failed) for one in reported):
            reported.append(oracle.collect())
        turn = step(config, state, tuple(reported))
        yield Turn(number, state, tuple(reported), turn)
        state = turn.state
        for command in turn.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
                if command.plan.deferred:
                    oracle.sample(SampleDeferred(command.plan.step))


def plans(turn: Turn) -> list[Plan]:
    return [c.plan for c in turn.transition.commands if isinstance(c, Execute)]


def has(kind: type) -> Callable[[Turn], bool]:
    return lambda turn: any(isinstance(one, kind) for one in turn.transition.reasons)


def planned(turn: Turn, **changes: Any) -> Transition:
    """The last plan of a turn is changed, in the commands and in the state."""
    moved, (*_, plan) = turn.transition, plans(turn)
    new = evolve(plan, **changes)
    commands = tuple(
        Execute(new) if isinstance(c, Execute) and c.plan is plan else c
        for c in moved.commands
    )
    state = evolve(moved.state, inflight=(*moved.state.inflight[:-1], new))
    return evolve(moved, state=state, commands=commands)


def sent(turn: Turn, **changes: Any) -> Transition:
    """The last plan of a turn is changed on its way to the device."""
    moved, (*_, plan) = turn.transition, plans(turn)
    commands = tuple(
        Execute(evolve(plan, **changes))
        if isinstance(c, Execute) and c.plan is plan
        else c
        for c in moved.commands
    )
    return evolve(moved, commands=commands)


def reasoned(turn: Turn, kind: type, **changes: Any) -> Transition:
    """The first reason of a kind is changed; without changes it is left out."""
    at = next(i for i, one in enumerate(turn.transition.reasons) if isinstance(one, kind))
    reasons = list(turn.transition.reasons)
    reasons[at : at + 1] = [evolve(reasons[at], **changes)] if changes else []
    return evolve(turn.transition, reasons=tuple(reasons))


def stated(turn: Turn, **changes: Any) -> Transition:
    """The state is changed, and nothing else."""
    return evolve(turn.transition, state=evolve(turn.transition.state, **changes))


def emitted(turn: Turn, **changes: Any) -> Transition:
    """What comes out is changed."""
    commands = tuple(
        evolve(c, **changes) if isinstance(c, Emit) else c
        for c in turn.transition.commands
    )
    return evolve(turn.transition, commands=commands)


def without_row(turn: Turn) -> Transition:
    """The first row is left out of the last plan, and the state knows it."""
    *_, plan = plans(turn)
    names = ("run_ids", "rows", "starts", "num_scheduled_tokens", "max_sampled_tokens")
    moved = planned(turn, **{name: getattr(plan, name)[1:] for name in names})
    run = moved.state.running
    scheduled = (run.scheduled[0] - plan.max_sampled_tokens[0], *run.scheduled[1:])
    return evolve(moved, state=run_with(moved.state, scheduled=scheduled))


def without_plan(turn: Turn) -> Transition:
    """Nothing was planned, and the state knows it."""
    (plan,), moved = plans(turn), turn.transition
    scheduled = tuple(map(sub, moved.state.running.scheduled, plan.max_sampled_tokens))
    state = evolve(run_with(moved.state, scheduled=scheduled), inflight=())
    return evolve(moved, state=state, commands=tuple(moved.commands[:-1]))


def swapped_tails(turn: Turn) -> Transition:
    """Two sequences have each other's last block, in the state."""
    state = turn.transition.state
    (one,), (two,), *rest = state.running.tables
    tables = (
        (Log(one[:-1] + two[-1:]),),
        (Log(two[:-1] + one[-1:]),),
        *rest,
    )
    return evolve(turn.transition, state=run_with(state, tables=tables))


def other_token(turn: Turn) -> Transition:
    """A sampled token is another one in the state."""
    state = turn.transition.state
    fresh = tuple(
        (*new[:-1], (new[-1] + 1) % 50) if new else new for new in state.running.fresh
    )
    return evolve(turn.transition, state=run_with(state, fresh=fresh))


def earlier(turn: Turn) -> Transition:
    """The head of the queue has a better place than the admitted one."""
    state, first = turn.transition.state, turn.transition.state.waiting.first()
    place = ((-1.0,), *first.place[1:])
    held = BlockedHead(place, state.blocked.cause if state.blocked else "")
    state = evolve(first_waits(state, place=place), blocked=held)
    live = evolve(state.requests[first.request.id], moved=((first.sample, (-1.0,)),))
    requests = state.requests.set(first.request.id, live)
    return evolve(turn.transition, state=evolve(state, requests=requests))


STEADY = tuple(Submit(ask("x" * n, 9, 12)) for n in (1, 2, 3))
FORKS = (Submit(ask("f", 10, 6, n=2)),)
CANCELLED = (STEADY, (), (), (Cancel("xx"),))
FINISHED = (STEADY, (), (), (Finish("xx", 0, 1, "stop"),))
FAILED = (STEADY, (), ("boom",))
TIGHT = evolve(CONFIG, num_blocks=9)
DEEP = evolve(TIGHT, depth=2)
FULL = tuple(Submit(ask("x" * n, 12, 12)) for n in (1, 2, 3))
RANKED = (
    Submit(ask("low", 12, 30, priority=5)),
    Submit(ask("lower", 12, 30, priority=6)),
)


@frozen
class Meek(Priority):
    """Strict priority, but no sample is preempted for waiting ones."""

    def may_preempt(self, state: Any, waiting: Any, running: Any) -> bool:
        del state, waiting, running
        return False


@frozen
class Bite:
    """A turn of a script is changed, or judged by other rules; a law must name what is
    wrong.
    """

    law: str  # a pattern of the message
    when: Callable[[Turn], bool]
    wrong: Callable[[Turn], Transition]
    config: EngineConfig = CONFIG
    script: tuple[tuple[Event | str, ...], ...] = (STEADY,)
    judged: EngineConfig | None = None  # by these rules, if they are not the engine's own
    budgets: tuple[int, ...] | None = None


def any_plan(turn: Turn) -> bool:
    return bool(plans(turn))


def decoding(turn: Turn) -> bool:
    return turn.number == 6


def as_it_is(turn: Turn) -> Transition:
    return turn.transition


def short(turn: Turn) -> bool:
    return any(
        isinstance(r, QueueBlocked) and r.cause == "blocks"
        for r in turn.transition.reasons
    )


def grows(turn: Turn) -> bool:
    return any(plan.grows for plan in plans(turn)[-1:])


def copies(turn: Turn) -> bool:
    return any(plan.copies for plan in plans(turn)[-1:])


def fills(turn: Turn) -> bool:
    return any(plan.fills for plan in plans(turn)[-1:])


def copied(turn: Turn, **changes: int) -> Transition:
    (copy,) = plans(turn)[-1].copies
    return planned(turn, copies=(evolve(copy, **changes),))


def grown(turn: Turn, **changes: Any) -> Transition:
    first, *rest = plans(turn)[-1].grows
    return planned(turn, grows=(evolve(first, **changes), *rest))


def ended(turn: Turn) -> bool:
    return any(isinstance(c, Emit) and c.finished for c in turn.transition.commands)


def first_finished(turn: Turn, **changes: Any) -> Transition:
    (done,) = (
        f for c in turn.transition.commands if isinstance(c, Emit) for f in c.finished
    )
    return emitted(turn, finished=(evolve(done, **changes),))


def bitten(bite: Bite) -> None:
    """A judge who believes the state before, and one who has read along, name the law;
    and as it was, the turn is right.
    """
    own = Ledger(bite.config, initial(bite.config))
    foreign = bite.judged is not None
    for turn in played(bite.config, *bite.script):
        if bite.when(turn):
            break
        own.take(turn.events, turn.transition)
    else:
        raise AssertionError("the script has no such turn")
    judge = Ledger.at(bite.judged or bite.config, turn.before)
    with pytest.raises(InvariantError, match=bite.law):
        judge.take(turn.events, bite.wrong(turn), bite.budgets)
    if not foreign and bite.budgets is None:
        with pytest.raises(InvariantError, match=bite.law):
            deepcopy(own).take(turn.events, bite.wrong(turn))
    own.take(turn.events, turn.transition)


def named(bites: tuple[Bite, ...]) -> list[str]:
    """Bites as the names of their tests."""
    return [f"{i}-{bite.law[:24]}" for i, bite in enumerate(bites)]
