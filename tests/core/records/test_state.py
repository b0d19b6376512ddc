"""The first state, and the two kinds of transition that only say something."""

from attrs import evolve

from minfer.policies.builtin import Window
from minfer.records.messages import Emit, Ended, Finished, Ignored, Submit
from minfer.records.state import (
    LiveRequest,
    Transition,
    emit,
    head_of_queue,
    ignore,
    initial,
)
from tests.core.test_engine import CONFIG, Bench, ask


def test_at_first_all_rows_and_blocks_are_free_and_the_lowest_row_goes_first() -> None:
    config = evolve(CONFIG, policy=Window())
    state = initial(config)
    assert state.free_rows == (3, 2, 1, 0)
    assert (state.blocks.pool.total, state.blocks.available) == (32, 32)
    assert state.policy == Window().start()
    assert not state.waiting
    assert not len(state.running)


def test_the_pool_has_the_run_of_the_configuration() -> None:
    assert initial(evolve(CONFIG, freed_run=3)).blocks.pool.run == 3


def test_who_is_next_is_the_first_whose_client_is_not_held_back() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1))
    bench.give(
        Submit(ask("runs")), *(Submit(ask(name, client=name.upper())) for name in "ab")
    )
    for shut, first in (("", "a"), ("A", "b"), ("B", "a"), ("AB", "a")):
        state = evolve(bench.state, deferred_clients=frozenset(shut))
        assert head_of_queue(state).request.id == first


def test_a_sample_that_got_a_better_rank_is_found_at_it() -> None:
    live = LiveRequest(((2.0,), 4, 0), 2, moved=((1, (1.0,)),))
    assert [live.place_of(sample) for sample in (0, 1)] == [
        ((2.0,), 4, 0),
        ((1.0,), 4, 1),
    ]


def test_what_came_out_says_who_ended_and_why() -> None:
    done = Finished("a", 2, "error", 7, "it failed", 3)
    turn = emit(initial(CONFIG), (done,), (("b", 0),), ((5,),))
    assert turn.commands == (Emit((("b", 0),), ((5,),), (done,)),)
    assert turn.reasons == (Ended("a", 2, "error", "it failed"),)
    assert turn.state == initial(CONFIG)


def test_events_without_meaning_are_reported_and_change_nothing() -> None:
    state = initial(CONFIG)
    assert ignore(state, "cancel", "unknown") == Transition(
        state, (), (Ignored("cancel", "unknown"),)
    )
