"""Requests that end with their prompts: no token, one vector."""

from typing import Any

from attrs import evolve

from minfer.blocks.keys import root_key
from minfer.records.messages import (
    Admitted,
    Cancel,
    Discarded,
    Executed,
    Failed,
    Submit,
)
from minfer.records.request import PromptOnly, Request
from tests.core.planning.test_scored import emitted, served
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.world import pooled_reference


def pooled(name: str, length: int, how: str = "last", **more: Any) -> Request:
    root = root_key(b"tests", b"")
    return ask(name, length, 0, prompt_only=PromptOnly(how), root=root, **more)


def test_chunks_of_a_prompt_yield_nothing_and_the_last_one_ends_it() -> None:
    bench = Bench()
    wishes = [pooled("a", 40), pooled("b", 23, "mean"), ask("c", 9, 5)]
    found = served(bench, *wishes)
    assert found == {(wish.id, 0): pooled_reference(wish, 4) for wish in wishes[:2]}
    for wish in wishes[:2]:
        done = bench.ended[wish.id, 0]
        assert (done.reason, done.length) == ("length", 0)
        assert not bench.out.get((wish.id, 0))
    assert bench.out["c", 0] == bench.right(wishes[2]), "its neighbour is as ever"
    assert all(sum(plan.num_scheduled_tokens) <= 16 for plan in bench.plans)
    opened = [one for plan in bench.plans for one in plan.opens]
    assert {one.name[0]: one.pooling for one in opened} == {
        "a": "last",
        "b": "mean",
        "c": "",
    }


def test_a_prompt_may_take_the_whole_context_and_the_whole_cache() -> None:
    bench = Bench(evolve(CONFIG, num_blocks=16))
    wish = pooled("whole", 64)
    assert served(bench, wish) == {("whole", 0): pooled_reference(wish, 4)}


def test_the_last_input_may_hit_and_a_mean_computes_all() -> None:
    bench = Bench()
    prompt = tuple(range(21))
    for name, how, hit in (("a", "mean", 0), ("b", "last", 20), ("c", "mean", 0)):
        wish = pooled(name, 0, how, prompt=prompt)
        assert served(bench, wish) == {(name, 0): pooled_reference(wish, 4)}
        (got,) = [one for one in bench.reasons_of(Admitted) if one.id == name]
        assert got.hit == got.cached == hit
    assert bench.state.blocks.available == CONFIG.num_blocks, "no twin was lost"


def test_a_mean_begins_again_where_its_prompt_begins_after_a_failure() -> None:
    for how, start in (("mean", 0), ("last", 16)):
        bench = Bench()
        wish = pooled("a", 40, how)
        bench.give(Submit(wish))
        bench.turn()
        bench.give(bench.oracle.fail("boom", halfway=True))
        assert len(bench.reasons_of(Discarded)) == 1
        assert bench.plans[-1].starts == (start,)
        assert len(bench.plans[-1].opens) == 1
        assert served(bench) == {("a", 0): pooled_reference(wish, 4)}


def test_a_vector_that_is_none_fails_the_step_and_none_at_all_does_not() -> None:
    for wrong in ((), (b"x", b"y"), ("x",)):
        bench = Bench()
        bench.give(Submit(pooled("a", 6)))
        done = bench.oracle.collect()
        assert not isinstance(done, Failed)
        bench.give(Executed(done.step, done.yields, pooled=wrong))  # type: ignore[arg-type]
        assert len(bench.reasons_of(Discarded)) == bool(wrong)
        assert bool(bench.state.requests) == bool(wrong)


def test_who_was_cancelled_has_no_vector() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(pooled("a", 6)), Submit(pooled("b", 7)))
    bench.give(Cancel("a"))
    assert set(emitted(bench.turn())) == {("b", 0)}
    assert bench.ended["a", 0].reason == "cancelled"
