"""Transfers that are wrong on purpose."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve

from minfer.blocks.prefix import ROOT
from minfer.records.messages import Loading, LostBlocks, Move, Submit
from minfer.records.state import EngineState, Transition, Turn
from minfer.records.tiers import NO_TIERS, Tiers, TransferKind
from minfer.testing import tier_laws
from minfer.testing.invariants import InvariantError, check
from minfer.testing.ledger import Ledger
from tests.core.tiers.hosted import TIGHT, Hosted
from tests.core.tiers.test_tiers import AGAIN, LONG


def turn_with(*, loads: bool) -> Turn:
    """A turn that begins a transfer."""
    bench = Hosted()
    if loads:
        bench.serve(LONG)
        bench.push_out()
    bench.late = True
    for number in range(20):
        before = bench.state
        events = (Submit(AGAIN if loads else LONG),) if not number else ()
        turn = bench.turn(*events)
        if any(isinstance(one, Move) for one in turn.commands):
            return Turn(number, before, bench.events, turn)
    raise AssertionError("nothing begins")


def changed(turn: Transition, change: Callable[[Move], Move]) -> Transition:
    commands = [change(one) if isinstance(one, Move) else one for one in turn.commands]
    return evolve(turn, commands=tuple(commands))


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: evolve(one, number=99), "did not begin"),
        (lambda one: evolve(one, kind=TransferKind.STORE_TO_EXTERNAL), "the other way"),
        (lambda one: evolve(one, targets=one.targets[::-1]), "other pages"),
        (lambda one: evolve(one, sources=one.sources[::-1]), "are read, not"),
    ],
)
def test_a_wrong_move_is_named(
    loads: bool, change: Callable[[Move], Move], why: str
) -> None:
    turn = turn_with(loads=loads)
    Ledger.at(TIGHT, turn.before).take(turn.events, turn.transition)
    with pytest.raises((InvariantError, KeyError), match=f"{why}|99"):
        Ledger.at(TIGHT, turn.before).take(turn.events, changed(turn.transition, change))


def test_what_is_published_in_its_turn_is_no_fault_of_a_load() -> None:
    """A running sequence releases blocks behind its window for a newcomer, after a load
    of the same content was chosen.
    """
    [transfer] = turn_with(loads=True).transition.state.tiers.transfers
    there, anew, empty = (
        cast(Any, SimpleNamespace(nodes=nodes))
        for nodes in (
            dict.fromkeys(transfer.keys, ((1,), ROOT, 0, 0, 0)),
            dict.fromkeys(transfer.keys, ((2,), ROOT, 1, 0, 0)),
            {},
        )
    )
    for before, now in ((empty, there), (there, empty), (there, anew)):
        tier_laws._check_writes_new(before, now, transfer)
    with pytest.raises(InvariantError, match="is there already"):
        tier_laws._check_writes_new(there, there, transfer)


def test_a_load_without_its_reason_and_a_loss_that_never_was_are_named() -> None:
    turn = turn_with(loads=True)
    bare = [one for one in turn.transition.reasons if not isinstance(one, Loading)]
    for reasons in (
        bare,
        [*turn.transition.reasons, LostBlocks(1, "x", TransferKind.LOAD_FROM_HOST)],
    ):
        wrong = evolve(turn.transition, reasons=tuple(reasons))
        with pytest.raises(InvariantError, match="tiers"):
            Ledger.at(TIGHT, turn.before).take(turn.events, wrong)


def wrong_tiers(state: EngineState, change: Callable[[Tiers], Tiers]) -> EngineState:
    return evolve(state, tiers=change(state.tiers))


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (lambda t: evolve(t, next_number=0), "tiers: transfers"),
        (lambda t: evolve(t, transfers=t.transfers * 2), "tiers|refcount|partition"),
        (lambda t: evolve(t, transfers=()), "partition|refcount"),
        (lambda t: evolve(t, host=None), "tiers: (transfers without|a tier that)"),
        (
            lambda t: evolve(
                t, transfers=(evolve(t.transfers[0], waiting=frozenset(["gone"])),)
            ),
            "tiers: blocks for a request",
        ),
        (lambda t: evolve(NO_TIERS, host=t.host), "partition|refcount"),
    ],
)
@pytest.mark.parametrize("loads", [False, True])
def test_a_wrong_state_is_named(
    loads: bool, change: Callable[[Tiers], Tiers], law: str
) -> None:
    state = turn_with(loads=loads).transition.state
    check(TIGHT, state)
    with pytest.raises(InvariantError, match=law):
        check(TIGHT, wrong_tiers(state, change))


def test_a_tier_that_is_not_configured_is_named() -> None:
    state = turn_with(loads=False).transition.state
    with pytest.raises(InvariantError, match="tiers: a tier that the configuration"):
        check(evolve(TIGHT, host=None), state)
