"""Beams in the engine: searches beside other requests, with and without room for all."""

from math import inf
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.beam import NEVER, BeamSearch
from minfer.engine import step
from minfer.messages import (
    Cancel,
    Emit,
    Executed,
    Finish,
    Forked,
    Ignored,
    Preempted,
    Submit,
    Voided,
)
from minfer.policy import FirstCome, Load
from minfer.preempt import preempt
from minfer.request import Request, SamplingParams
from minfer.void import _give_up
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask
from tests.core.world import World, beam_reference, tiny_config


def search(name: str, width: int, length: int = 6, most: int = 8, **more: Any) -> Request:
    how = more.pop("beams", BeamSearch())
    greedy = SamplingParams(temperature=0)
    bound = {"sampling": greedy, "lockstep": True, "beams": how}
    return ask(name, length, most, n=width, **bound, **more)


def is_right(bench: Bench, wish: Request) -> None:
    config = bench.config
    due = beam_reference(
        wish, config.block_size, VOCAB, config.max_model_len, config.window
    )
    assert len(due) == wish.n
    for sample, one in enumerate(due):
        done = bench.ended[wish.id, sample]
        assert bench.out[wish.id, sample] == one.tokens
        assert (done.reason, done.length) == (one.reason, len(one.tokens))
        assert done.logprob == one.logprob


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early", [False, True, NEVER])
def test_a_search_alone(width: int, early: bool | str) -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=8, num_blocks=80))
    wish = search(
        "a",
        width,
        11,
        13,
        beams=BeamSearch(early_stopping=early),
        stop_ids=frozenset({3, 5}),
    )
    bench.give(Submit(wish))
    bench.drain()
    is_right(bench, wish)


def test_a_child_stands_on_its_parents_blocks_and_writes_its_own() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=60))
    wish = search("a", 4, 11, 13)
    bench.give(Submit(wish))
    forks = 0
    while bench.state.requests:
        turn = bench.turn()
        for one in (reason for reason in turn.reasons if isinstance(reason, Forked)):
            ids, tables = bench.state.running.ids, bench.state.running.tables
            child = tables[ids.index(("a", one.sample))]
            parent = tables[ids.index(("a", one.parent))]
            shared = one.hit // CONFIG.block_size
            assert child[:shared] == parent[:shared]
            assert set(child[shared:]).isdisjoint(parent[shared:])
            forks += 1
    assert forks > 4
    is_right(bench, wish)
    opened = sum(len(plan.opens) for plan in bench.plans)
    assert opened == 4 + forks, "who goes on in its seat is not told again"


def test_beams_sit_still_until_all_have_offered() -> None:
    """Prompts and tails of forks are computed under a budget of few tokens."""
    bench = Bench(evolve(CONFIG, max_num_batched_tokens=4, num_blocks=60))
    wish = search("a", 4, 11, 13)
    bench.give(Submit(wish))
    bench.drain()
    is_right(bench, wish)
    assert any(len(plan.gens) < 4 for plan in bench.plans[6:])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_searches_beside_requests_that_run_ahead(depth: int) -> None:
    roomy = evolve(CONFIG, num_blocks=90, max_num_seqs=9, max_num_batched_tokens=32)
    bench = Bench(evolve(roomy, depth=depth))
    searches = [search("a", 4, 11, 13), search("b", 3, 11, 13), search("c", 2, 5, 20)]
    plain = ask("plain", 9, 30)
    bench.give(*map(Submit, (*searches, plain)))
    bench.drain()
    for wish in searches:
        is_right(bench, wish)
    assert bench.out["plain", 0] == bench.right(plain)


def test_twins_of_another_searchs_blocks_are_given_up_for_them() -> None:
    """The same search twice at once: blocks of one are found by the other."""
    bench = Bench(evolve(CONFIG, num_blocks=60, max_num_seqs=8))
    wishes = [search(name, 4, prompt=tuple(range(9)), most=14) for name in "ab"]
    bench.give(*map(Submit, wishes))
    bench.drain()
    for wish in wishes:
        is_right(bench, wish)
    own = [one for one in bench.reasons_of(Forked) if one.parent == one.sample]
    assert own, "a parent took its seat again"
    assert bench.state.blocks.available == 60


class Ends(FirstCome):
    """Lets nobody in before somebody ends."""

    def admit_from(self, state: Any, load: Load) -> float:
        del state, load
        return inf


@pytest.mark.parametrize("policy", [FirstCome(), Ends()])
def test_searches_that_wait_for_each_other_do_not_wait_for_ever(
    policy: FirstCome,
) -> None:
    """Each holds a seat, and its other beam is in line: the one that ranks behind gives
    its own up, though its policy would not.
    """
    bench = Bench(evolve(CONFIG, num_blocks=60, max_num_seqs=4))
    bench.give(Submit(search("a", 2)), Submit(search("bb", 2)))
    for _ in range(4):
        bench.turn()
    assert len(bench.state.running) == 4
    done = bench.oracle.collect()
    state = bench.state
    for name in (("a", 1), ("bb", 1)):
        at = state.running.ids.index(name)
        state, _ = preempt(bench.config, state, at, ("a", 0))
    # As if others ran in the rows that they had.
    state = evolve(state, free_rows=())
    turn = step(evolve(bench.config, policy=policy), state, (done,))
    (gone,) = (one for one in turn.reasons if isinstance(one, Preempted))
    assert (gone.id, gone.sample, gone.by) == ("bb", 0, ("a", 1))
    assert turn.state.running.ids == (("a", 0), ("a", 1))
    assert turn.state.inflight, "it goes on"


def test_a_beam_does_not_give_way_to_its_own_search() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=60, max_num_seqs=4))
    bench.give(Submit(search("a", 2)))
    for _ in range(4):
        bench.turn()
    done = bench.oracle.collect()
    state, _ = preempt(bench.config, bench.state, 1, ("a", 0))
    turn = step(bench.config, evolve(state, free_rows=()), (done,))
    assert not any(isinstance(one, Preempted) for one in turn.reasons)
    assert turn.state.running.ids == (("a", 0),)


def test_a_search_that_was_preempted_comes_to_the_same() -> None:
    found = 0
    for blocks in range(22, 34):
        bench = Bench(evolve(CONFIG, num_blocks=blocks, max_num_seqs=6, depth=2))
        wishes = [search("a", 3, 9, 16), search("bb", 2, 9, 16), ask("ccc", 9, 24)]
        bench.give(*map(Submit, wishes))
        bench.drain()
        for wish in wishes[:2]:
            is_right(bench, wish)
        found += len(bench.reasons_of(Preempted))
    assert found


def test_a_search_ends_as_a_whole_when_the_steps_of_a_beam_fail() -> None:
    bench = Bench(evolve(CONFIG, max_failures=2, num_blocks=60))
    bench.give(Submit(search("a", 3)))
    for _ in range(4):
        bench.turn()
    while bench.state.requests:
        bench.give(bench.oracle.fail("boom", halfway=True))
    assert {bench.ended["a", beam].reason for beam in range(3)} == {"error"}
    assert not bench.state.searches
    assert bench.state.blocks.available == 60


def test_a_step_without_the_candidates_of_a_beam_has_failed() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=60))
    wish = search("a", 3)
    bench.give(Submit(wish))
    for _ in range(3):
        bench.turn()
    done = bench.oracle.collect()
    assert isinstance(done, Executed)
    bench.oracle.plans.clear()
    turn = bench.give(evolve(done, candidates=done.candidates[1:]))
    (voided,) = (one for one in turn.reasons if isinstance(one, Voided))
    assert voided.error == "a beam has offered no candidates"
    bench.drain()
    is_right(bench, wish)


def test_a_search_is_cancelled_as_any_request_and_no_beam_ends_alone() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=60))
    bench.give(Submit(search("a", 3)))
    for _ in range(3):
        bench.turn()
    turn = bench.turn(Finish("a", 1, 2))
    assert any(isinstance(one, Ignored) for one in turn.reasons)
    bench.turn(Cancel("a"))
    assert {bench.ended["a", beam].reason for beam in range(3)} == {"cancelled"}
    assert not any(bench.out.values()), "nothing is said of it before its end"


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (search("a", 5), "up to 16, and as many as sequences run at once"),
        (evolve(search("a", 2), lockstep=False), "in lockstep"),
        (evolve(search("a", 2), reads_cache=False), "reads the cache"),
        (evolve(search("a", 1), output=(1,)), "without pooling and output"),
        (search("a", 4, 20, 20), "of which each beam may take 7"),
    ],
)
def test_a_search_that_could_never_run(wish: Request, why: str) -> None:
    bench = Bench()
    bench.give(Submit(wish))
    assert {bench.ended["a", beam].reason for beam in range(wish.n)} == {"rejected"}
    assert why in bench.ended["a", 0].error


def test_worlds_of_searches() -> None:
    """Requests of every kind beside them, under fire, in caches that are too small."""
    ended = 0
    for seed in range(12):
        rng = Random(seed)
        world = World(tiny_config(rng), rng, searching=0.6)
        for _ in range(50):
            if rng.random() < 0.3:
                world.burst(2)
            trouble = (world.fail, world.late, world.cancel_some, world.finish_some)
            if rng.random() < 0.1:
                rng.choice(trouble)()
            world.turn()
        world.drain()
        ended += world.paths["beams"]
    assert ended > 40


def test_a_search_that_is_given_up_ends_in_the_order_of_its_beams() -> None:
    """Also where it is a later beam that failed too often."""
    bench = Bench(evolve(CONFIG, num_blocks=60, max_num_seqs=8))
    bench.give(Submit(search("a", 3, 6, 20)), Submit(ask("plain", 6, 30)))
    while ("a", 2) not in bench.state.running.ids:
        bench.turn()
    state = evolve(bench.state, inflight=())
    assert state.running.ids[:2] == (("a", 0), ("a", 1))
    faults = {("a", 1): bench.config.max_failures}
    given_up = _give_up(bench.config, state, faults, "x", Voided(0, "x", 1, 1))
    (emit,) = (one for one in given_up.commands if isinstance(one, Emit))
    ended = [(one.id, one.sample) for one in emit.finished]
    assert ended == sorted(ended)
    assert {one.reason for one in emit.finished} == {"error"}
    assert set(given_up.state.running.ids) == {("plain", 0)}
