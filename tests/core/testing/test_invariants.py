"""The checker bites: states and turns that are wrong on purpose are named."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice
from operator import sub
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer import schedule as scheduling
from minfer.blocks import Blocks
from minfer.config import EngineConfig
from minfer.engine import step
from minfer.log import Log
from minfer.messages import (
    Admitted,
    Cancel,
    Emit,
    Ended,
    Event,
    Execute,
    Failed,
    Finish,
    Finished,
    Held,
    Ignored,
    Missed,
    Preempted,
    Submit,
    Tick,
    Voided,
    WakeAt,
)
from minfer.plan import Fill, Plan, SampleApart
from minfer.pmap import Map
from minfer.policies import Priority
from minfer.pool import Pool
from minfer.prefix import Node, PrefixIndex
from minfer.runs.oracle import Oracle
from minfer.sequence import Running
from minfer.state import EngineState, Fence, Hold, Transition, Turn, initial
from minfer.testing import (
    accounts,
    invariants,
    ledger,
    lifetime,
    line_laws,
    books,
    event_laws,
    decision_laws,
    state_laws,
    content_laws,
    plan_laws,
    progress,
)
from minfer.testing.invariants import InvariantError, check
from minfer.testing.ledger import Ledger, check_turn
from minfer.testing.line_laws import check_evictions
from minfer.testing.progress import check_progress
from minfer.tickets import words_of
from minfer.waiting import Line
from tests.core.executing import opened
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


def _node(
    state: EngineState, *, users: int | None = None, kids: int | None = None
) -> Any:
    """The pool's nodes with the counts of block 0 changed."""
    nodes = state.blocks.prefix.nodes
    node = nodes[0]
    wrong = node._replace(
        users=node.users if users is None else users,
        children=node.children if kids is None else kids,
    )
    return nodes.set(0, wrong)


def _first_waits(state: EngineState, **changes: Any) -> EngineState:
    """With the first in line changed."""
    first = state.waiting.first()
    line = state.waiting.remove(first.place).insert(evolve(first, **changes))
    return evolve(state, waiting=line)


def _named_twice(state: EngineState, *, other: bool) -> EngineState:
    """The first published block of a table is also its second, or is another
    sequence's.
    """
    run = state.running
    i = next(i for i, own in enumerate(run.chains) if own.sealed > 1)
    mine = set(run.tables[i])
    instead = (
        next(b for b in state.blocks.prefix.nodes if b not in mine)
        if other
        else run.tables[i][1]
    )
    table = Log((instead, *run.tables[i][1:]))
    return run_with(state, tables=(*run.tables[:i], table, *run.tables[i + 1 :]))


def _first_chain(state: EngineState, **changes: Any) -> EngineState:
    """What the first that runs has published is changed."""
    first, *rest = state.running.chains
    return run_with(state, chains=(evolve(first, **changes), *rest))


def _also_stops(state: EngineState) -> EngineState:
    """Somebody that runs ends at a token that nobody looks for."""
    first, *rest = state.running.seqs
    request = evolve(first.request, stop_ids=frozenset({49}))
    return run_with(state, seqs=(evolve(first, request=request), *rest))


def _bad_states() -> dict[str, Callable[[EngineState], EngineState]]:
    def shared(s: EngineState) -> EngineState:
        tables = s.running.tables
        return run_with(
            s, tables=(tables[0], Log(tables[1][:-1] + tables[0][-1:]), *tables[2:])
        )

    return {
        "partition": shared,
        "partition: ": lambda s: blocks_with(s, free=s.blocks.free + 1),
        "cache truth": lambda s: blocks_with(s, nodes=_node(s, kids=7)),
        "refcount": lambda s: blocks_with(s, nodes=_node(s, users=7)),
        "evictable": lambda s: blocks_with(s, idle=s.blocks.prefix.idle.set(3, 3)),
        "columns": lambda s: run_with(s, rows=s.running.rows[:-1]),
        "order": lambda s: evolve(
            s,
            running=Running(
                *(getattr(s.running, c.name)[::-1] for c in Running.__attrs_attrs__)
            ),
        ),
        "rows": lambda s: run_with(s, rows=(s.running.rows[1], *s.running.rows[1:])),
        "generations": lambda s: run_with(s, gens=(999, *s.running.gens[1:])),
        "coverage": lambda s: run_with(
            s, sched=(s.running.sched[0] + 1, *s.running.sched[1:])
        ),
        "conservation": lambda s: evolve(s, requests=s.requests.delete("x")),
        "depth": lambda s: evolve(s, inflight=s.inflight[::-1]),
        "fence": lambda s: evolve(s, fences=(Fence(77, (), ()),)),
        "mark": lambda s: run_with(s, mark=(99, *s.running.mark[1:])),
        "ripe": lambda s: run_with(s, ripe=(99, *s.running.ripe[1:])),
        "faults": lambda s: evolve(s, faults=((("nobody", 0), 1),)),
        "time": lambda s: evolve(s, time=0.0),
        "order: .* from the future": lambda s: evolve(s, arrivals=0),
        "history": lambda s: _first_waits(s, history=(1, 2, 3)),
        "stops": _also_stops,
        "filling": lambda s: run_with(
            evolve(s, filling=False), base=(s.running.sched[0] + 1, *s.running.base[1:])
        ),
        "keys": lambda s: _first_chain(s, keys=Log((b"x" * 32,) * 9)),
        "window": lambda s: _first_chain(s, low=1),
        "self-alias": lambda s: _named_twice(s, other=False),
        "aliasing": lambda s: _named_twice(s, other=True),
        "evictable: tickets": lambda s: blocks_with(s, words=words_of((77,))),
    }


@pytest.mark.parametrize("law", _bad_states())
def test_a_wrong_state_is_named(law: str) -> None:
    state = crowded().state
    config = evolve(CONFIG, depth=2)
    check(config, state)
    with pytest.raises(InvariantError, match=law.strip(": ")) as caught:
        check(config, _bad_states()[law](state))
    assert caught.value.law


def test_behind_a_window_nobody_stands_on_a_leaf() -> None:
    config = evolve(CONFIG, window=8)
    bench = Bench(config)
    bench.give(Submit(ask("x", 20, 12)))
    for _ in range(4):
        bench.turn()
    chain = evolve(
        bench.state.running.chains[0], leaf=next(iter(bench.state.blocks.prefix.nodes))
    )
    with pytest.raises(InvariantError, match="leaf"):
        check(config, run_with(bench.state, chains=(chain,)))


# --- turns ------------------------------------------------------------------------------


def played(config: EngineConfig, *script: tuple[Event | str, ...]) -> Iterator[Turn]:
    """Turns of an engine: each with the result of the earliest step, or as the script
    says.
    """
    state, oracle = (
        initial(config),
        Oracle(config.block_size, config.vocab_size, config.window),
    )
    for number in range(80):
        told: list[Event] = [Tick(float(number + 1))]
        for one in script[number] if number < len(script) else ():
            if isinstance(one, str):
                told.append(oracle.fail(one, halfway=False))
            else:
                told.append(one)
        if oracle.plans and not any(isinstance(one, Failed) for one in told):
            told.append(oracle.collect())
        turn = step(config, state, tuple(told))
        yield Turn(number, state, tuple(told), turn)
        state = turn.state
        for command in turn.commands:
            if isinstance(command, Execute):
                oracle.launch(command.plan)
                if command.plan.apart:
                    oracle.sample(SampleApart(command.plan.step))


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


def in_lockstep() -> Turn:
    """A turn in which a row is planned that may not run ahead, and decodes."""
    bound = Submit(evolve(ask("x", 5, 9), lockstep=True))
    turns = played(evolve(CONFIG, depth=2), (bound,))
    return next(turn for turn in turns if turn.number > 1 and plans(turn))


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        ("apart", lambda turn: planned(turn, apart=())),
        ("lockstep", lambda turn: stated(turn, lockstep=False)),
    ],
)
def test_who_may_not_run_ahead_is_sampled_apart_and_looked_for(
    law: str, wrong: Callable[[Turn], Transition]
) -> None:
    turn = in_lockstep()
    assert plans(turn)[-1].apart == (0,)
    with pytest.raises(InvariantError, match=law):
        check_turn(evolve(CONFIG, depth=2), turn.before, turn.events, wrong(turn))


def test_who_may_not_run_ahead_is_not_planned_ahead() -> None:
    """A schedule that forgets it plans the row twice."""
    bound = Submit(evolve(ask("x", 5, 9), lockstep=True))
    config = evolve(CONFIG, depth=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "_in_lockstep", lambda _: [])
        turns = [*islice(played(config, (bound,)), 5)]
    wrong = next(turn for turn in turns if len(turn.transition.state.inflight) == 2)
    with pytest.raises(InvariantError, match="ahead"):
        check_turn(config, wrong.before, wrong.events, wrong.transition)


def without_row(turn: Turn) -> Transition:
    """The first row is left out of the last plan, and the state knows it."""
    *_, plan = plans(turn)
    names = ("gens", "rows", "starts", "counts", "most")
    moved = planned(turn, **{name: getattr(plan, name)[1:] for name in names})
    run = moved.state.running
    sched = (run.sched[0] - plan.most[0], *run.sched[1:])
    return evolve(moved, state=run_with(moved.state, sched=sched))


def without_plan(turn: Turn) -> Transition:
    """Nothing was planned, and the state knows it."""
    (plan,), moved = plans(turn), turn.transition
    sched = tuple(map(sub, moved.state.running.sched, plan.most))
    state = evolve(run_with(moved.state, sched=sched), inflight=())
    return evolve(moved, state=state, commands=tuple(moved.commands[:-1]))


def swapped_tails(turn: Turn) -> Transition:
    """Two sequences have each other's last block, in the state."""
    state = turn.transition.state
    one, two, *rest = state.running.tables
    tables = (Log(one[:-1] + two[-1:]), Log(two[:-1] + one[-1:]), *rest)
    return evolve(turn.transition, state=run_with(state, tables=tables))


def other_token(turn: Turn) -> Transition:
    """A sampled token is another one in the state."""
    state = turn.transition.state
    fresh = tuple(
        (*new[:-1], (new[-1] + 1) % 50) if new else new for new in state.running.fresh
    )
    return evolve(turn.transition, state=run_with(state, fresh=fresh))


def earlier(turn: Turn) -> Transition:
    """The first in line has a better place than whoever was let in."""
    state, first = turn.transition.state, turn.transition.state.waiting.first()
    place = ((-1.0,), *first.place[1:])
    held = Hold(place, state.held.cause if state.held else "")
    state = evolve(_first_waits(state, place=place), held=held)
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
    """Strict priority, but nobody gives way to those in line."""

    def displaces(self, state: Any, waiting: Any, running: Any) -> bool:
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
        isinstance(r, Held) and r.cause == "blocks" for r in turn.transition.reasons
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


BITES = (
    Bite(
        "plan: a sequence in the wrong row",
        decoding,
        lambda t: planned(t, rows=plans(t)[-1].rows[::-1]),
    ),
    Bite(
        "plan: a row without",
        decoding,
        lambda t: sent(t, gens=(999, *plans(t)[-1].gens[1:])),
    ),
    Bite(
        "plan: a row starts at",
        decoding,
        lambda t: planned(t, starts=(0, *plans(t)[-1].starts[1:])),
    ),
    Bite("plan: its number", decoding, lambda t: planned(t, step=99)),
    Bite("plan: columns", decoding, lambda t: sent(t, most=(1,))),
    Bite("feed: host or device", decoding, lambda t: planned(t, fills=(Fill(0, (1,)),))),
    Bite(
        "feed: not the history",
        fills,
        lambda t: planned(
            t, fills=tuple(evolve(f, tokens=f.tokens[::-1]) for f in plans(t)[-1].fills)
        ),
    ),
    Bite(
        "feed: only the end",
        fills,
        lambda t: sent(t, most=tuple(1 - m for m in plans(t)[-1].most)),
    ),
    Bite("open", decoding, lambda t: planned(t, opens=(opened(ask("x")),))),
    Bite("open", fills, lambda t: planned(t, opens=plans(t)[-1].opens[1:])),
    Bite("repeat", decoding, lambda t: planned(t, repeat=2)),
    Bite("repeat", decoding, as_it_is, judged=evolve(CONFIG, max_repeat=3)),
    Bite("budget: .* allows 1", lambda t: t.number == 0, as_it_is, budgets=(1,)),
    Bite(
        "budget: .* a prompt waits",
        lambda t: t.number == 0,
        as_it_is,
        budgets=(64,),
        judged=evolve(CONFIG, max_num_batched_tokens=64),
    ),
    Bite("left out", decoding, without_row),
    Bite("left out", decoding, as_it_is, judged=evolve(CONFIG, depth=2)),
    Bite("work conservation", decoding, without_plan),
    Bite(
        "in flight",
        decoding,
        lambda t: stated(t, inflight=(evolve(plans(t)[-1], repeat=5),)),
    ),
    Bite(
        "wake",
        decoding,
        lambda t: evolve(t.transition, commands=(*t.transition.commands, WakeAt(1.0))),
    ),
    Bite("time", decoding, lambda t: stated(t, time=99.0)),
    Bite("emit: columns", decoding, lambda t: emitted(t, tokens=())),
    Bite("emit", decoding, lambda t: emitted(t, ids=(), tokens=())),
    Bite("emit", decoding, lambda t: emitted(t, tokens=((1, 1), (1, 1), (1, 1)))),
    Bite(
        "emit",
        decoding,
        lambda t: emitted(
            t, ids=tuple((n, 7) for n, _ in t.transition.state.running.ids)
        ),
    ),
    Bite("known", decoding, other_token),
    Bite("device table", decoding, swapped_tails),
    Bite(
        "lifetime",
        decoding,
        lambda t: emitted(t, finished=(Finished("nobody", 0, "stop", 0),)),
    ),
    Bite(
        "lifetime",
        decoding,
        lambda t: emitted(t, finished=(Finished("x", 0, "stop", 0),)),
    ),
    Bite("lifetime", ended, lambda t: emitted(t, finished=())),
    Bite("lifetime", ended, lambda t: first_finished(t, reason="stop"), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, length=99), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, sample=1), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, cached=1), script=CANCELLED),
    Bite("lifetime", ended, lambda t: first_finished(t, length=3), script=FINISHED),
    Bite(
        "lifetime", ended, lambda t: first_finished(t, reason="length"), script=FINISHED
    ),
    Bite("lifetime", ended, lambda t: first_finished(t, id="x"), script=FINISHED),
    Bite(
        "lifetime: .* why",
        ended,
        lambda t: first_finished(t, error=""),
        script=((Submit(ask("big", 99)),),),
    ),
    Bite(
        "lifetime",
        has(Ignored),
        lambda t: evolve(
            t.transition,
            commands=(
                *t.transition.commands,
                Emit((), (), (Finished("x", 0, "rejected", 0, "so"),)),
            ),
        ),
        script=(STEADY, (Submit(ask("x")),)),
    ),
    Bite(
        "reason",
        has(Ignored),
        lambda t: reasoned(t, Ignored),
        script=(STEADY, (Cancel("nobody"),)),
    ),
    Bite("reason", has(Ended), lambda t: reasoned(t, Ended)),
    Bite(
        "reason: voided",
        has(Voided),
        lambda t: reasoned(t, Voided, rows=7),
        script=FAILED,
    ),
    Bite("faults", has(Voided), lambda t: stated(t, faults=()), script=FAILED),
    Bite(
        "fault: ",
        has(Voided),
        as_it_is,
        script=FAILED,
        judged=evolve(CONFIG, max_failures=2),
    ),
    Bite(
        "reason: .* not its wait",
        has(Admitted),
        lambda t: reasoned(t, Admitted, waited=0.5),
    ),
    Bite("reason: .* are known", has(Admitted), lambda t: reasoned(t, Admitted, known=3)),
    Bite(
        "reason: .* cannot be",
        has(Admitted),
        lambda t: reasoned(t, Admitted, hit=3, cached=3),
    ),
    Bite("hit share", has(Admitted), lambda t: reasoned(t, Admitted, prompt=3)),
    Bite("reason: None", has(Missed), lambda t: reasoned(t, Missed)),
    Bite("open|lifetime", has(Admitted), lambda t: reasoned(t, Admitted)),
    Bite(
        "hit share|lifetime",
        has(Admitted),
        lambda t: evolve(t.transition, reasons=t.transition.reasons * 2),
    ),
    Bite("copy: .* from where", copies, lambda t: planned(t, copies=()), script=(FORKS,)),
    Bite("copy: .* sibling", copies, lambda t: copied(t, source=29), script=(FORKS,)),
    Bite("copy: .* sibling", copies, lambda t: copied(t, count=3), script=(FORKS,)),
    Bite("copy", copies, lambda t: copied(t, target=29), script=(FORKS,)),
    Bite("grow", grows, lambda t: grown(t, at=1)),
    Bite("grow", grows, lambda t: grown(t, row=3)),
    Bite("device table|coverage", grows, lambda t: planned(t, grows=())),
    Bite("device table|coverage", grows, lambda t: grown(t, blocks=(30,))),
    Bite(
        "reason: .* knows",
        has(Preempted),
        lambda t: reasoned(t, Preempted, known=1),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "reason: .* knows",
        has(Preempted),
        lambda t: reasoned(t, Preempted, computed=1),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "reason: .* for nobody",
        has(Preempted),
        lambda t: reasoned(t, Preempted, by=("no", 1)),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "left out|lifetime",
        has(Preempted),
        lambda t: reasoned(t, Preempted),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "fence: none until",
        lambda t: (
            len(t.transition.state.inflight) > 1 and bool(t.transition.state.fences)
        ),
        lambda t: stated(
            t,
            fences=tuple(
                evolve(f, until=t.transition.state.inflight[-1].step)
                for f in t.transition.state.fences
            ),
        ),
        DEEP,
        (FULL, (), (), (), (Cancel("x"),)),
    ),
    Bite(
        "held: .* nothing holds",
        has(Held),
        lambda t: stated(t, held=None),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* it is blocks",
        has(Held),
        lambda t: (
            stated(t, held=evolve(t.transition.state.held, cause="rows"))
            if t.transition.state.held
            else as_it_is(t)
        ),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* but it needs",
        has(Held),
        as_it_is,
        evolve(TIGHT, watermark=4),
        (FULL,),
        judged=TIGHT,
    ),
    Bite(
        "reason: .* it needs",
        short,
        lambda t: reasoned(t, Held, needs=77),
        TIGHT,
        (FULL,),
    ),
    Bite("reason: .* is news", has(Held), lambda t: reasoned(t, Held), TIGHT, (FULL,)),
    Bite(
        "held: .* for budget",
        has(Held),
        as_it_is,
        evolve(CONFIG, max_num_batched_tokens=9),
        judged=CONFIG,
        budgets=(16,),
    ),
    Bite(
        "inversion",
        has(Held),
        as_it_is,
        evolve(CONFIG, num_blocks=12, policy=Meek()),
        (RANKED, (), (), (Submit(ask("urgent", 20, 4)),)),
        judged=evolve(CONFIG, num_blocks=12, policy=Priority()),
    ),
    Bite(
        "order: somebody was overtaken",
        lambda t: has(Admitted)(t) and bool(t.transition.state.waiting),
        earlier,
        evolve(TIGHT, policy=Priority()),
        (FULL,),
    ),
)


@pytest.mark.parametrize(
    "bite", BITES, ids=[f"{i}-{b.law[:24]}" for i, b in enumerate(BITES)]
)
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    turns = played(bite.config, *bite.script)
    own, foreign = Ledger(bite.config, initial(bite.config)), bite.judged is not None
    for turn in turns:
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
    own.take(turn.events, turn.transition)  # and as it was, the turn is right


def test_nothing_is_said_of_a_sample_after_its_end() -> None:
    ledger, over = Ledger(CONFIG, initial(CONFIG)), False
    for turn in played(CONFIG, (Submit(ask("a", 5, 3)), Submit(ask("b", 5, 20)))):
        if over:
            break
        ledger.take(turn.events, turn.transition)
        over = ended(turn)
    for wrong in (
        emitted(
            turn, ids=(("a", 0), *turn.transition.state.running.ids), tokens=((1,), (1,))
        ),
        emitted(turn, finished=(Finished("a", 0, "stop", 3),)),
    ):
        with pytest.raises(InvariantError, match=r"emit|lifetime"):
            deepcopy(ledger).take(turn.events, wrong)
    ledger.take(turn.events, turn.transition)


def test_an_id_may_be_used_anew_when_all_its_samples_have_ended() -> None:
    ledger = Ledger(CONFIG, initial(CONFIG))
    again = (Submit(ask("a", 5, 3)),)
    for turn in played(CONFIG, again, again, *[()] * 9, again):
        ledger.take(turn.events, turn.transition)
        assert has(Ignored)(turn) == (turn.number == 1)


def test_content_of_shared_blocks_is_compared_by_tokens() -> None:
    twins = tuple(
        Submit(ask(name, 9, 9, prompt=(1, 2, 3, 4, 5, 6, 7, 8, 9))) for name in "ab"
    )
    ledger = Ledger(CONFIG, initial(CONFIG))
    turns = played(CONFIG, twins[:1], (), (), (), twins[1:])
    for turn in turns:
        if turn.number == 4:
            break
        ledger.take(turn.events, turn.transition)
    blocks = ledger.contents.blocks
    assert len(blocks) == 2
    for block, one in blocks.items():
        blocks[block] = evolve(one, tokens=(*one.tokens[:-1], 77))
    with pytest.raises(InvariantError, match="shared content"):
        ledger.take(turn.events, turn.transition)


def test_a_block_that_was_not_computed_is_not_published() -> None:
    ledger = Ledger(CONFIG, initial(CONFIG))
    for turn in played(CONFIG, (Submit(ask("a", 9, 30)),)):
        ledger.take(turn.events, turn.transition)
        if ledger.contents.blocks:
            break
    books, contents = ledger.books, ledger.contents
    contents.blocks.clear()
    contents.check(books, ledger.state)
    assert len(contents.blocks) == 2
    contents.blocks.clear()
    books.seats[0].kv = 7
    with pytest.raises(InvariantError, match="publish after write"):
        contents.check(books, ledger.state)


def test_a_line_that_does_not_find_its_own_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = crowded().state
    monkeypatch.setattr(Line, "find", lambda *_: None)
    with pytest.raises(InvariantError, match="is not found"):
        check(evolve(CONFIG, depth=2), state)


def test_who_gives_way_may_have_more_left_while_others_before_it_are_in_flight() -> None:
    first, last = ("first", 0), ("last", 0)
    before, after = (
        {first: (3, 0, 0), last: (9, 7, 0)},
        {first: (3, 0, 0), last: (9, 7, 2)},
    )
    check_progress(before, after, {last})
    idle = {
        name: {**left, first: (3, 0, 1)}
        for name, left in (("was", before), ("is", after))
    }
    for wrong in (
        (before, after, ()),
        (before, after, {first}),
        (idle["was"], idle["is"], {last}),
    ):
        with pytest.raises(InvariantError, match="is left, and was"):
            check_progress(*wrong)


def test_a_good_step_after_which_as_much_is_left_as_before_is_named() -> None:
    turns = played(CONFIG, STEADY)
    ledger = Ledger(CONFIG, initial(CONFIG))
    for turn in turns:
        if decoding(turn):
            break
        ledger.take(turn.events, turn.transition)
    still, less = deepcopy(ledger), deepcopy(ledger)
    still.measure = {
        name: (tokens - 1, 1, 0) for name, (tokens, _, _) in ledger.measure.items()
    }
    less.measure = dict.fromkeys(ledger.measure, (0, 0, 0))
    for wrong, why in ((still, "nothing has changed"), (less, "is left, and was")):
        with pytest.raises(InvariantError, match=f"progress: .*{why}"):
            wrong.take(turn.events, turn.transition)
    ledger.take(turn.events, turn.transition)


def idlers() -> PrefixIndex:
    """Three idle blocks, last used at 4, 5 and 6."""
    nodes = {block: Node(bytes([block]), -1, 0, 0, 4 + block) for block in range(3)}
    idle = {4 + block: block for block in range(3)}
    return PrefixIndex(nodes=Map(nodes), idle=Map(idle), next_use=7)


def test_what_was_used_last_is_evicted_last() -> None:
    before = idlers()
    first = evolve(before, nodes=before.nodes.delete(0), idle=before.idle.delete(4))
    check_evictions(before, first)
    last = evolve(before, nodes=before.nodes.delete(2), idle=before.idle.delete(6))
    with pytest.raises(InvariantError, match="eviction: last used at 6 is gone, at 4 is"):
        check_evictions(before, last)


def test_what_was_in_use_is_not_as_old_as_it_looks() -> None:
    before = idlers()
    live = evolve(
        before,
        nodes=before.nodes.set(2, Node(b"\2", -1, 1, 0, -1)),
        idle=before.idle.delete(6),
    )
    with pytest.raises(InvariantError, match="eviction: block 2 was in use"):
        check_evictions(live, before)
    check_evictions(evolve(live, next_use=6), before)


# Laws that no test breaks by hand; the first follows from the others.
UNBITTEN = {"quiescence", "committed", "exclusive tail", "preemption"}


def laws() -> set[str]:
    """The names of all laws, read off the specification's syntax trees."""
    found = set[str]()
    for module in (
        accounts,
        invariants,
        ledger,
        lifetime,
        line_laws,
        books,
        event_laws,
        decision_laws,
        state_laws,
        content_laws,
        plan_laws,
        progress,
    ):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                at = {"require": 1, "InvariantError": 0}.get(node.func.id)
                name = node.args[at] if at is not None and len(node.args) > at else None
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    found.add(name.value)
    return found


def test_every_law_has_a_test_in_which_it_bites_or_is_listed() -> None:
    here = Path(__file__).read_text("utf-8").split("UNBITTEN")[0]
    quiet = {name for name in laws() if not re.search(rf'["|]{name}', here)}
    assert quiet == UNBITTEN
