"""Who is let in, who gives way and who waits is named where it is wrong on purpose."""

from copy import deepcopy

import pytest
from attrs import evolve

from minfer.messages import (
    Admitted,
    Held,
    Preempted,
    Submit,
    WakeAt,
)
from minfer.pmap import Map
from minfer.policies import Priority
from minfer.prefix import NONE, ROOT, PrefixIndex
from minfer.state import Fence
from minfer.testing.accounts import Told
from minfer.testing.books import Books
from minfer.testing.decision_laws import read_decisions
from minfer.testing.event_laws import fold
from minfer.testing.invariants import InvariantError
from minfer.testing.line_laws import check_evictions, check_line
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


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)


def test_who_gives_way_while_blocks_are_coming_is_named() -> None:
    turn = next(turn for turn in played(TIGHT, FULL) if has(Preempted)(turn))
    before, moved = turn.before, turn.transition
    books, told = Books.at(TIGHT, before), Told()
    for event in turn.events:
        fold(books, event, told)
    planning = read_decisions(books, before, moved, None)
    check_line(books, before, moved, deepcopy(planning))
    fences = (Fence(before.next_step, (), ()),)  # behind which blocks are coming
    wrong = evolve(moved, state=evolve(moved.state, fences=fences))
    with pytest.raises(InvariantError, match="preemption: though blocks were coming"):
        check_line(books, evolve(before, fences=fences), wrong, planning)


def idlers() -> PrefixIndex:
    """Three idle blocks, last used at 4, 5 and 6."""
    nodes = {bytes([i]): (i, ROOT, 0, 0, 4 + i) for i in range(3)}
    idle = {4 + i: bytes([i]) for i in range(3)}
    return PrefixIndex(nodes=Map(nodes), idle=Map(idle), next_use=7)


def test_what_was_used_last_is_evicted_last() -> None:
    before = idlers()
    first = evolve(before, nodes=before.nodes.delete(b"\0"), idle=before.idle.delete(4))
    check_evictions(before, first)
    last = evolve(before, nodes=before.nodes.delete(b"\2"), idle=before.idle.delete(6))
    with pytest.raises(InvariantError, match="eviction: last used at 6 is gone, at 4 is"):
        check_evictions(before, last)


def test_what_was_in_use_is_not_as_old_as_it_looks() -> None:
    before = idlers()
    live = evolve(
        before,
        nodes=before.nodes.set(b"\2", (2, ROOT, 1, 0, NONE)),
        idle=before.idle.delete(6),
    )
    with pytest.raises(InvariantError, match="eviction: block 2 was in use"):
        check_evictions(live, before)
    check_evictions(evolve(live, next_use=6), before)
