"""States that do not follow are named."""

from copy import deepcopy

import pytest
from attrs import evolve

from minfer.records.drafting import NOTHING_DRAFTED, Drafting, SampleAcceptance
from minfer.records.messages import (
    Cancel,
    Discarded,
    Pause,
    Propose,
    Submit,
)
from minfer.records.plan import Copy
from minfer.records.speculation import HOST, Speculation
from minfer.testing.books import Books
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import Ledger
from minfer.testing.state_laws import check_flights, check_publication
from minfer.values.pmap import Map
from tests.core.test_engine import CONFIG, ask
from tests.core.testing.turns import (
    DEEP,
    FAILED,
    FULL,
    STEADY,
    Bite,
    bitten,
    blocks_with,
    busy,
    decoding,
    grown,
    grows,
    has,
    named,
    other_token,
    planned,
    plans,
    played,
    run_with,
    stated,
    swapped_tails,
)

DRAFTING = Speculation(drafter=HOST, drafts=2, adaptive=False)
HOSTED = evolve(CONFIG, depth=2, speculation=DRAFTING)
BITES = (
    Bite(
        "in flight",
        decoding,
        lambda t: stated(t, inflight=(evolve(plans(t)[-1], copies=(Copy(1, 2, 1),)),)),
    ),
    Bite("time", decoding, lambda t: stated(t, time=99.0)),
    Bite("known", decoding, other_token),
    Bite("device table", decoding, swapped_tails),
    Bite(
        "paused",
        decoding,
        lambda t: stated(t, paused=frozenset()),
        script=((Submit(evolve(ask("x"), needs_host_mask=True)), Pause("x", 0)),),
    ),
    Bite(
        "drafts: what was proposed",
        lambda t: bool(t.transition.state.drafting.proposals),
        lambda t: stated(t, drafting=NOTHING_DRAFTED),
        HOSTED,
        ((*STEADY, Propose("x", 0, 9, (1,))), (Propose("x", 0, 10, (1,)),)),
    ),
    Bite(
        "drafts: .* are remembered",
        decoding,
        lambda t: stated(
            t, drafting=Drafting(learnt=Map({("gone", 0): SampleAcceptance()}))
        ),
    ),
    Bite(
        "drafts: records that no number",
        decoding,
        lambda t: stated(
            t, drafting=Drafting(learnt=Map({("x", 0): SampleAcceptance()}))
        ),
    ),
    Bite("faults", has(Discarded), lambda t: stated(t, faults=()), script=FAILED),
    Bite("device table|coverage", grows, lambda t: planned(t, grows=())),
    Bite("device table|coverage", grows, lambda t: grown(t, blocks=(30,))),
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
)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)


def test_kv_that_is_not_there_is_named() -> None:
    """Of who is in no step that ends in this turn, it is where it was."""
    late = (STEADY, (), (), (), (Submit(ask("late", 9, 12)),))
    config = evolve(CONFIG, depth=2)
    for turn in played(config, *late):
        if turn.number == 5:
            break
    own = Ledger.at(config, turn.before)
    wrong = deepcopy(own)
    seat = wrong.books.accounts["late", 0].seat
    assert seat is not None
    seat.kv += 1
    with pytest.raises(InvariantError, match=r"committed: .* has KV of 1, not of 0"):
        wrong.take(turn.events, turn.transition)
    own.take(turn.events, turn.transition)


def test_a_block_that_is_to_be_written_and_can_be_found_is_named() -> None:
    """The invariants would say sooner that it was not computed."""
    state = busy().state
    books = Books.at(evolve(CONFIG, depth=2), state)
    check_flights(books.config, books.flights, state)
    first, *rest = state.running.chains
    found = evolve(first, sealed=(len(state.running.tables[0][0]),))
    wrong = run_with(state, chains=(found, *rest))
    with pytest.raises(InvariantError, match="exclusive tail: others may read"):
        check_flights(books.config, books.flights, wrong)


def test_a_prompt_that_was_computed_and_cannot_be_found_is_named() -> None:
    config = evolve(CONFIG, depth=1)
    turns = played(config, (Submit(ask("x", 20, 9)),))
    turn = next(turn for turn in turns if turn.number == 1)
    books, after = Books.at(config, turn.before), turn.transition.state
    (gen,), (chain,) = after.running.run_ids, after.running.chains
    assert chain.sealed == (4,)
    books.filled[gen] = 16
    check_publication(books, turn.before, after)
    books.filled[gen] = 20
    with pytest.raises(InvariantError, match=r"publish in time: .* published 4 of 5"):
        check_publication(books, turn.before, after)
    nodes = after.blocks.prefix.nodes.set(chain.keys[4], ((9,), b"", 1, 0, -1))
    twin = blocks_with(after, nodes=nodes)
    check_publication(books, turn.before, twin)
