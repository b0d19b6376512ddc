"""Searches that are wrong on purpose are named."""

from collections.abc import Callable

import pytest
from attrs import evolve

from minfer.beam import Candidates, Search
from minfer.engine import step
from minfer.messages import Forked, Submit
from minfer.pmap import Map
from minfer.state import EngineState, Transition
from minfer.testing.invariants import InvariantError, check
from minfer.testing.ledger import check_turn
from tests.core.test_branch import search
from tests.core.test_engine import CONFIG, Bench

OFFER = Candidates(0, (1,), (-1.0,))


def midway() -> Bench:
    """Two beams that are about to know their next tokens."""
    bench = Bench(evolve(CONFIG, num_blocks=60))
    bench.give(Submit(search("a", 2)))
    for _ in range(3):
        bench.turn()
    return bench


def searching(state: EngineState, search_: Search) -> EngineState:
    return evolve(state, searches=Map({"a": search_}))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda s: evolve(s, searches=Map()), "a search without beams"),
        (
            lambda s: searching(s, evolve(s.searches["a"], offers=(OFFER, OFFER))),
            "has heard all",
        ),
        (
            lambda s: evolve(
                s, running=evolve(s.running, known=(7, *s.running.known[1:]))
            ),
            "",
        ),
    ],
    ids=["none", "all", "length"],
)
def test_a_state_with_a_search_that_cannot_be(
    wrong: Callable[[EngineState], EngineState], why: str
) -> None:
    bench = midway()
    with pytest.raises(InvariantError, match=f"beams: .*{why}" if why else "coverage"):
        check(bench.config, wrong(bench.state))


def test_a_beam_that_offers_has_a_seat() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=60, max_num_seqs=2))
    bench.give(Submit(search("a", 2)))
    state = bench.state
    (name,) = state.running.ids
    other = 1 - name[1]
    offers = tuple(OFFER if beam == other else None for beam in range(2))
    with pytest.raises(InvariantError, match="beams: beam 1 of a offers, but does not"):
        check(bench.config, searching(state, evolve(state.searches["a"], offers=offers)))


def wrongly(wrong: Callable[[Transition], Transition]) -> str:
    """What the ledger says of the turns of a search, each made wrong, at first."""
    bench = midway()
    for _ in range(20):
        before, events = bench.state, (bench.oracle.collect(),)
        turn = step(bench.config, before, events)
        try:
            check_turn(bench.config, before, events, wrong(turn))
        except InvariantError as error:
            return str(error)
        bench.oracle.plans.clear()
        bench = midway()
    raise AssertionError("nothing was found")


def test_a_choice_that_is_not_the_best() -> None:
    def other(turn: Transition) -> Transition:
        found = turn.state.searches["a"]
        state = searching(turn.state, evolve(found, logprobs=(0.0, 0.0)))
        return evolve(turn, state=state)

    assert wrongly(other).startswith("beams: ")


def test_a_fork_that_is_not_said() -> None:
    bench = midway()
    while True:
        before, events = bench.state, (bench.oracle.collect(),)
        turn = step(bench.config, before, events)
        check_turn(bench.config, before, events, turn)
        said = tuple(one for one in turn.reasons if not isinstance(one, Forked))
        if said != turn.reasons:
            break
        bench.give(*events)
    with pytest.raises(InvariantError, match="reason: forked"):
        check_turn(bench.config, before, events, evolve(turn, reasons=said))
