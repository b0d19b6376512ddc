"""Who is let in, who gives way and who waits is named where it is wrong on purpose."""

from copy import deepcopy
from typing import Any

import pytest
from attrs import evolve, frozen

from minfer.blocks.pool import Pool
from minfer.blocks.prefix import NONE, ROOT, PrefixIndex
from minfer.policies.builtin import Priority
from minfer.policies.fair_seats import JOIN_EVERY_STEPS, FairSeats
from minfer.records.messages import (
    Admitted,
    Preempted,
    QueueBlocked,
    Submit,
    WakeAt,
)
from minfer.records.policy import FirstCome, Load
from minfer.records.sequence import Sequence
from minfer.records.state import BlockedHead, Fence, Turn
from minfer.testing.accounts import TurnReport
from minfer.testing.books import Books
from minfer.testing.decision_laws import read_decisions
from minfer.testing.event_laws import fold
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import check_turn
from minfer.testing.plan_laws import Planning
from minfer.testing.queue_laws import (
    _may_pass,
    check_evictions,
    check_free_order,
    check_queue,
)
from minfer.values.pmap import Map
from tests.core.test_engine import CONFIG, ask
from tests.core.testing.turns import (
    FULL,
    RANKED,
    TIGHT,
    Bite,
    Meek,
    as_it_is,
    bitten,
    decoding,
    earlier,
    has,
    named,
    played,
    reasoned,
    short,
    stated,
    without_plan,
)

SHARED = (
    (Submit(evolve(ask("b", 4, 30), client="b")),),
    tuple(Submit(evolve(ask(f"a{i}", 4, 30), client="a")) for i in range(9)),
    *((),) * 12,
)


def shared(turn: Turn) -> bool:
    """A request waits as its client has its share of seats, and would be let in else."""
    state = turn.transition.state
    reported = state.blocked is not None and state.blocked.cause == "share"
    step = state.inflight[-1].step if state.inflight else 1
    return reported and len(state.running) > 2 and step % JOIN_EVERY_STEPS == 0


BITES = (
    Bite("left out", decoding, as_it_is, judged=evolve(CONFIG, depth=2)),
    Bite("work conservation", decoding, without_plan),
    Bite(
        "wake",
        decoding,
        lambda t: evolve(t.transition, commands=(*t.transition.commands, WakeAt(1.0))),
    ),
    Bite(
        "left out|lifetime",
        has(Preempted),
        lambda t: reasoned(t, Preempted),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* nothing blocks",
        has(QueueBlocked),
        lambda t: stated(t, blocked=None),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* it is blocks",
        has(QueueBlocked),
        lambda t: (
            stated(t, blocked=evolve(t.transition.state.blocked, cause="rows"))
            if t.transition.state.blocked
            else as_it_is(t)
        ),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* but it needs",
        has(QueueBlocked),
        as_it_is,
        evolve(TIGHT, watermark=4),
        (FULL,),
        judged=TIGHT,
    ),
    Bite(
        "reason: .* it needs",
        short,
        lambda t: reasoned(t, QueueBlocked, needs=77),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "reason: .* is news",
        has(QueueBlocked),
        lambda t: reasoned(t, QueueBlocked),
        TIGHT,
        (FULL,),
    ),
    Bite(
        "held: .* for budget",
        has(QueueBlocked),
        as_it_is,
        evolve(CONFIG, max_num_batched_tokens=9),
        judged=CONFIG,
        budgets=(16,),
    ),
    Bite(
        "inversion",
        has(QueueBlocked),
        as_it_is,
        evolve(CONFIG, num_blocks=12, policy=Meek()),
        (RANKED, (), (), (Submit(ask("urgent", 20, 4)),)),
        judged=evolve(CONFIG, num_blocks=12, policy=Priority()),
    ),
    Bite(
        "held: .* and its client is deferred",
        shared,
        as_it_is,
        evolve(CONFIG, policy=FairSeats(least=1)),
        SHARED,
        judged=evolve(CONFIG, policy=FairSeats(least=9)),
    ),
    Bite(
        "held: .* for rows",
        shared,
        lambda t: stated(
            t, blocked=BlockedHead(t.transition.state.waiting.first().place, "rows")
        ),
        evolve(CONFIG, policy=FairSeats(least=1)),
        SHARED,
    ),
    Bite(
        "order: samples were overtaken",
        lambda t: has(Admitted)(t) and bool(t.transition.state.waiting),
        earlier,
        evolve(TIGHT, policy=Priority()),
        (FULL,),
    ),
)


def test_only_who_is_held_back_is_passed_and_not_by_its_own() -> None:
    config = evolve(CONFIG, policy=FairSeats())
    one, same = (
        Sequence(evolve(ask(n, 4, 3), client="a"), 0, ((), 0, 0), 0.0, ()) for n in "ab"
    )
    other = evolve(same, request=evolve(same.request, client="b"))
    known, none, unknown = (Planning(None, held) for held in ({"a"}, set[str](), None))
    assert _may_pass(config, known, one, other)
    assert _may_pass(config, unknown, one, other)
    assert not _may_pass(CONFIG, unknown, one, other), "its policy defers none"
    assert not _may_pass(config, none, one, other)
    assert not _may_pass(config, known, one, same)
    assert _may_pass(config, known, one, evolve(same, preempted=1)), "it has been in"
    assert not _may_pass(config, known, evolve(one, preempted=1), other)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)


def test_who_gives_way_while_blocks_are_coming_is_named() -> None:
    turn = next(turn for turn in played(TIGHT, FULL) if has(Preempted)(turn))
    before, moved = turn.before, turn.transition
    books, reported = Books.at(TIGHT, before), TurnReport()
    for event in turn.events:
        fold(books, event, reported)
    planning = read_decisions(books, before, moved, None)
    check_queue(books, before, moved, deepcopy(planning))
    fences = (Fence(before.next_step, (), ()),)  # behind which blocks are coming
    wrong = evolve(moved, state=evolve(moved.state, fences=fences))
    with pytest.raises(InvariantError, match="preemption: though blocks were coming"):
        check_queue(books, evolve(before, fences=fences), wrong, planning)


def idlers() -> PrefixIndex:
    """Three idle blocks, last used at 4, 5 and 6."""
    nodes = {bytes([i]): ((i,), ROOT, 0, 0, 4 + i) for i in range(3)}
    idle = {4 + i: bytes([i]) for i in range(3)}
    return PrefixIndex(nodes=Map(nodes), idle=Map(idle), next_use=7)


def test_what_was_used_last_is_evicted_last() -> None:
    before = idlers()
    first = evolve(before, nodes=before.nodes.delete(b"\0"), idle=before.idle.delete(4))
    check_evictions(before, first)
    last = evolve(before, nodes=before.nodes.delete(b"\2"), idle=before.idle.delete(6))
    with pytest.raises(InvariantError, match="eviction: last used at 6 is gone, at 4 is"):
        check_evictions(before, last)


def test_a_parent_is_as_old_as_the_last_use_of_it_or_its_children() -> None:
    """Of a chain whose end was used at 4: its parent was used at 7, and is younger than
    what was used at 5.
    """
    lone = idlers()
    parent, child = b"\7", b"\0"
    nodes = lone.nodes.set(parent, ((7,), ROOT, 0, 1, 7)).set(
        child, ((0,), parent, 0, 0, 4)
    )
    before = evolve(lone, nodes=nodes, next_use=8)
    both = nodes.delete(parent).delete(child)
    left = before.idle.delete(4)
    with pytest.raises(InvariantError, match="eviction: last used at 7 is gone, at 5 is"):
        check_evictions(before, evolve(before, nodes=both, idle=left))
    solo = nodes.delete(child).set(parent, ((7,), ROOT, 0, 0, 7))
    check_evictions(before, evolve(before, nodes=solo, idle=left.set(7, parent)))
    older = evolve(before, nodes=nodes.set(parent, ((7,), ROOT, 0, 1, 2)))
    gone = evolve(older, nodes=older.nodes.delete(parent).delete(child), idle=left)
    check_evictions(older, gone)


def test_free_blocks_are_handed_out_in_their_order() -> None:
    runs = Map({0: (6, 5), 1: (4, 3)})
    before = Pool(9, fresh=7, spare=(1, 2), freed=runs, free=8)
    check_free_order(before, before)
    right = [
        Pool(9, fresh=7, spare=(2,), freed=runs, free=7),
        Pool(9, fresh=7, freed=runs, free=6),
        Pool(9, fresh=7, spare=(0, 2), freed=runs, free=8),  # one came back
        Pool(9, fresh=7, spare=(2,), freed=Map({0: (6, 5)}), free=5),  # run first
    ]
    wrong = [
        Pool(9, fresh=7, spare=(1,), freed=runs, free=7),
        Pool(9, fresh=7, spare=(2, 1), freed=runs, free=8),
        Pool(9, fresh=8, spare=(1, 2), freed=runs, free=7),
        Pool(9, fresh=7, spare=(1, 2), freed=Map({0: (6, 5)}), free=6),
    ]
    for after in right:
        check_free_order(before, after)
    for after in wrong:
        with pytest.raises(InvariantError, match="free order: "):
            check_free_order(before, after)


@frozen
class Punctual(FirstCome):
    """Admits no request before the time 9."""

    def admit_from(self, state: Any, load: Load) -> float:
        del state, load
        return 9.0


def test_the_engine_is_woken_at_the_time_that_the_policy_gave() -> None:
    config = evolve(CONFIG, policy=Punctual())
    (turn, *_) = played(config, (Submit(ask("x")),))
    assert turn.transition.commands == (WakeAt(9.0),)
    check_turn(config, turn.before, turn.events, turn.transition)
    wrong = evolve(turn.transition, commands=(WakeAt(9.5),))
    with pytest.raises(InvariantError, match=r"wake: at 9\.5; the policy said 9\.0"):
        check_turn(config, turn.before, turn.events, wrong)


def test_what_was_in_use_is_not_as_old_as_it_looks() -> None:
    before = idlers()
    live = evolve(
        before,
        nodes=before.nodes.set(b"\2", ((2,), ROOT, 1, 0, NONE)),
        idle=before.idle.delete(6),
    )
    with pytest.raises(InvariantError, match=r"eviction: block \(2,\) was in use"):
        check_evictions(live, before)
    check_evictions(evolve(live, next_use=6), before)
