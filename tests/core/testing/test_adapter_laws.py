"""Slots and loads of adapters that are wrong on purpose."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from minfer.records.adapters import Adapters, UnreadyAdapters
from minfer.records.messages import (
    AdapterFailed,
    AdapterLoading,
    AdapterLost,
    Admitted,
    Execute,
    LoadAdapter,
    SlotBlocked,
    Submit,
)
from minfer.records.state import EngineState, Transition, Turn
from minfer.testing.invariants import InvariantError, check
from minfer.testing.ledger import Ledger
from minfer.values.pmap import Map
from tests.core.lifecycle.adapted import ADAPTED, Adapted, asking


def loading() -> Turn:
    """A turn that begins a load into the slot of an adapter that is not used any more,
    while another one is used.
    """
    bench = Adapted()
    bench.serve(asking("a", "a1"))
    bench.turn(Submit(asking("b", "b2", max_tokens=30)))
    bench.turn()
    before = bench.state
    turn = bench.turn(Submit(asking("c", "c3")), Submit(asking("d", "d4")))
    return Turn(0, before, bench.events, turn)


def refuses(turn: Turn, wrong: Transition, law: str) -> None:
    Ledger.at(ADAPTED, turn.before).take(turn.events, turn.transition)
    with pytest.raises(InvariantError, match=law):
        Ledger.at(ADAPTED, turn.before).take(turn.events, wrong)


def with_slot(state: EngineState, index: int, **changes: Any) -> EngineState:
    slots = state.adapters
    return evolve(
        state, adapters=slots.with_slot(index, evolve(slots.slots[index], **changes))
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda load: evolve(load, slot=1), "reported"),
        (lambda load: evolve(load, adapter="d4"), "reported"),
    ],
)
def test_a_load_without_its_reason_is_named(
    change: Callable[[LoadAdapter], LoadAdapter], why: str
) -> None:
    turn = loading()
    commands = [
        change(one) if isinstance(one, LoadAdapter) else one
        for one in turn.transition.commands
    ]
    refuses(turn, evolve(turn.transition, commands=tuple(commands)), f"adapters: .*{why}")


@pytest.mark.parametrize(
    ("slot", "adapter", "evicted", "why"),
    [
        (1, "c3", "b2", "1 running samples use the slot"),
        (7, "c3", "", "where"),
        (0, "b2", "a1", "does not want it"),
        (0, "c3", "", "'a1' was there"),
    ],
)
def test_a_wrong_load_is_named(slot: int, adapter: str, evicted: str, why: str) -> None:
    turn = loading()

    def wrong(one: Any) -> Any:
        if isinstance(one, LoadAdapter):
            return LoadAdapter(adapter, slot)
        if isinstance(one, AdapterLoading):
            return evolve(one, slot=slot, adapter=adapter, evicted=evicted)
        return one

    commands = tuple(map(wrong, turn.transition.commands))
    reasons = tuple(map(wrong, turn.transition.reasons))
    changed = evolve(turn.transition, commands=commands, reasons=reasons)
    refuses(turn, changed, f"adapters: .*{why}")


def test_a_slot_given_out_of_turn_is_named() -> None:
    turn = loading()

    def wrong(one: Any) -> Any:
        if isinstance(one, LoadAdapter):
            return evolve(one, adapter="d4")
        if isinstance(one, AdapterLoading):
            return evolve(one, id="d", adapter="d4")
        return one

    state = with_slot(turn.transition.state, 0, adapter="d4")
    changed = Transition(
        state,
        tuple(map(wrong, turn.transition.commands)),
        tuple(map(wrong, turn.transition.reasons)),
    )
    refuses(turn, changed, "adapters: .*for which")


def test_a_false_reason_of_a_wait_is_named() -> None:
    turn = loading()
    wrong = [
        evolve(one, used=0) if isinstance(one, SlotBlocked) else one
        for one in turn.transition.reasons
    ]
    refuses(turn, evolve(turn.transition, reasons=tuple(wrong)), "adapters: SlotBlocked")


def test_a_load_in_an_engine_without_slots_is_named() -> None:
    bench = Adapted(evolve(ADAPTED, adapter_slots=0))
    before = bench.state
    turn = bench.give()
    wrong = evolve(turn, commands=(*turn.commands, LoadAdapter("a1", 0)))
    with pytest.raises(InvariantError, match="adapters: a load, and no slot"):
        Ledger.at(bench.config, before).take(bench.events, wrong)


def test_a_row_that_reads_another_slot_is_named() -> None:
    bench = Adapted()
    bench.turn(Submit(asking("a", "a1")))
    before = bench.state
    turn = bench.turn()
    [execute] = [one for one in turn.commands if isinstance(one, Execute)]
    [opened] = execute.plan.opens
    for slot in (1, -1):
        plan = evolve(execute.plan, opens=(evolve(opened, adapter_slot=slot),))
        commands = [
            Execute(plan) if isinstance(one, Execute) else one for one in turn.commands
        ]
        wrong = Transition(
            evolve(turn.state, inflight=(plan,)), tuple(commands), turn.reasons
        )
        with pytest.raises(InvariantError, match="adapters: row 0 reads slot"):
            Ledger.at(ADAPTED, before).take(bench.events, wrong)


def test_a_loss_that_is_not_reported_is_named() -> None:
    bench = Adapted()
    bench.late = True
    bench.give(Submit(asking("a", "a1")))
    before = bench.state
    turn = bench.give(AdapterFailed("a1", 0, "x"))
    reasons = [one for one in turn.reasons if not isinstance(one, AdapterLost)]
    with pytest.raises(InvariantError, match="adapters: lost"):
        Ledger.at(ADAPTED, before).take(
            bench.events, evolve(turn, reasons=tuple(reasons))
        )


def test_more_samples_than_may_pass_are_named() -> None:
    bench = Adapted(evolve(ADAPTED, adapter_slots=1))
    bench.turn(Submit(asking("a", "a1", max_tokens=30)))
    bench.turn(Submit(asking("waits", "b2")))
    for number in range(9):
        before = bench.state
        turn = bench.turn(Submit(asking(f"a{number}", "a1", max_tokens=1)))
        if any(isinstance(one, Admitted) for one in turn.reasons):
            ledger = Ledger.at(bench.config, before)
            ledger.books.passes[0] = 4
            with pytest.raises(InvariantError, match="slot turns: 5 samples of slot 0"):
                ledger.take(bench.events, turn)
            return
    raise AssertionError("nothing passes")


def test_a_slot_that_is_left_unused_is_named() -> None:
    bench = Adapted()
    bench.late = True
    before = bench.state
    turn = bench.give(Submit(asking("a", "a1")))
    commands = [one for one in turn.commands if not isinstance(one, LoadAdapter)]
    reasons = [one for one in turn.reasons if not isinstance(one, AdapterLoading)]
    adapters = evolve(before.adapters, unready=UnreadyAdapters(frozenset({"a1"})))
    wrong = Transition(
        evolve(turn.state, adapters=adapters), tuple(commands), tuple(reasons)
    )
    with pytest.raises(InvariantError, match=r"held|work conservation"):
        Ledger.at(ADAPTED, before).take(bench.events, wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda slots: evolve(slots, slots=slots.slots[:1]),
        lambda slots: slots.with_slot(1, evolve(slots.slots[0], users=0)),
        lambda slots: slots.with_slot(1, evolve(slots.slots[1], users=2)),
        lambda slots: slots.with_slot(1, evolve(slots.slots[1], loading=True)),
        lambda slots: slots.with_slot(0, evolve(slots.slots[0], adapter="")),
        lambda slots: slots.with_slot(0, evolve(slots.slots[0], last_use=99)),
    ],
)
def test_a_wrong_state_is_named(change: Callable[[Adapters], Adapters]) -> None:
    state = loading().transition.state
    check(ADAPTED, state)
    with pytest.raises(InvariantError, match="adapters: "):
        check(ADAPTED, evolve(state, adapters=change(state.adapters)))


def test_a_queue_that_is_miscounted_is_named() -> None:
    state = loading().transition.state
    wrong: tuple[dict[str, Any], ...] = ({"adapters": Map()}, {"num_with_adapter": 7})
    for changes in wrong:
        with pytest.raises(InvariantError, match="adapters: waiting samples"):
            check(ADAPTED, evolve(state, waiting=evolve(state.waiting, **changes)))
