"""Requests whose prompts are scored, and such as end with their prompts."""

from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import root_key
from minfer.planning.step_builder import row_cost
from minfer.policies.builtin import Priority
from minfer.records.messages import (
    Admitted,
    Discarded,
    Emit,
    Preempted,
    Submit,
)
from minfer.records.request import Request, SamplingParams
from minfer.records.sequence import SampleId
from minfer.records.state import Transition
from minfer.records.token_logprobs import unpack_parts
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.world import reported_ranks, scored_reference

SCORED = SamplingParams(prompt_logprobs=2, temperature=0)


def wish(name: str, length: int, most: int = 0, *, scored: bool, **more: Any) -> Request:
    root = root_key(b"tests", b"")
    made = ask(name, length, most, root=root, **more)
    return evolve(made, sampling=SCORED) if scored else made


def emitted(turn: Transition) -> dict[SampleId, bytes]:
    found: dict[SampleId, bytes] = {}
    for command in turn.commands:
        if isinstance(command, Emit) and command.pooled:
            for name, one in zip(command.ids, command.pooled, strict=True):
                found[name] = found.get(name, b"") + one
    return {name: one for name, one in found.items() if one}


def served(bench: Bench, *wishes: Request) -> dict[SampleId, bytes]:
    """Serve requests to their ends; returns what came of their prompts."""
    found = emitted(bench.turn(*map(Submit, wishes)))
    for _ in range(300):
        if not bench.state.requests:
            return found
        for name, one in emitted(bench.turn()).items():
            found[name] = found.get(name, b"") + one
    raise AssertionError("not drained")


def hits(bench: Bench) -> dict[SampleId, int]:
    return {(one.id, one.sample): one.hit for one in bench.reasons_of(Admitted)}


def test_a_prompt_is_scored_chunk_by_chunk_and_its_neighbour_is_as_ever() -> None:
    bench = Bench()
    scored, plain = wish("a", 40, 5, scored=True), ask("b", 9, 5)
    found = served(bench, scored, plain)
    assert reported_ranks(found.pop(("a", 0))) == scored_reference(scored, 4)
    assert not found
    for one in (scored, plain):
        assert bench.out[one.id, 0] == bench.right(one)


def test_what_is_cached_is_computed_again_and_what_was_computed_is_cached() -> None:
    bench = Bench()
    for name, scored, hit in (("a", True, 0), ("b", True, 0), ("c", False, 20)):
        one = wish(name, 0, 3, prompt=tuple(range(21)), scored=scored)
        found = served(bench, one)
        due = {(name, 0): scored_reference(one, 4)} if scored else {}
        assert {key: reported_ranks(data) for key, data in found.items()} == due
        assert hits(bench)[name, 0] == hit
    assert bench.state.blocks.available == CONFIG.num_blocks


def test_one_of_several_samples_computes_the_prompt_and_the_others_share_it() -> None:
    bench = Bench()
    one = wish("a", 23, 4, scored=True, n=3)
    found = served(bench, one)
    assert {key: reported_ranks(data) for key, data in found.items()} == {
        ("a", 0): scored_reference(one, 4)
    }
    assert hits(bench) == {("a", 0): 0, ("a", 1): 20, ("a", 2): 20}


def test_who_is_sent_back_in_its_prompt_begins_again_and_after_it_does_not() -> None:
    for turns, hit in ((1, 0), (5, 40)):
        bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Priority()))
        low = wish("a", 40, 9, scored=True, priority=2)
        found = emitted(bench.give(Submit(low)))
        for _ in range(turns):
            for name, one in emitted(bench.turn()).items():
                found[name] = found.get(name, b"") + one
        for name, one in served(bench, ask("b", 5, 2, priority=0)).items():
            found[name] = found.get(name, b"") + one
        assert len(bench.reasons_of(Preempted)) == 1
        assert bench.reasons_of(Admitted)[-1].hit == hit
        assert reported_ranks(found["a", 0]) == scored_reference(low, 4)
        assert bench.out["a", 0] == bench.right(low)


def test_after_a_failure_it_goes_on_where_its_scores_ended() -> None:
    bench = Bench()
    one = wish("a", 40, scored=True)
    bench.give(Submit(one))
    first = emitted(bench.turn())["a", 0]
    bench.give(bench.oracle.fail("boom", halfway=True))
    assert len(bench.reasons_of(Discarded)) == 1
    assert bench.plans[-1].starts == (16,)
    rest = served(bench)["a", 0]
    assert reported_ranks(first + rest) == scored_reference(one, 4)
    indices = [at for at, _ in unpack_parts(first + rest, one.prompt)]
    assert indices == [*range(1, 40)]


@pytest.mark.parametrize("scored", [False, True])
def test_a_request_that_wants_no_token_ends_with_its_prompt(scored: bool) -> None:
    bench = Bench(evolve(CONFIG, num_blocks=16))
    one = wish("whole", 64, scored=scored)  # the whole context, and the whole cache
    found = served(bench, one)
    assert bool(found) == scored
    done = bench.ended["whole", 0]
    assert (done.reason, done.length) == ("length", 0)
    assert not bench.out.get(("whole", 0))
    again = wish("again", 40, 2, scored=False)
    served(bench, evolve(again, prompt=one.prompt[:40]))
    assert hits(bench)["again", 0] == 36


def test_what_was_resumed_with_output_is_not_scored_again() -> None:
    bench = Bench()
    one = wish("a", 12, 6, scored=True)
    right = bench.right(one)
    found = served(bench, evolve(one, output=right[:2]))
    assert not found
    assert bench.out["a", 0] == right[2:]


def test_what_a_row_takes_of_the_budget() -> None:
    config = evolve(CONFIG, scored_cost=3)
    for scored, cost in ((False, 5), (True, 1 + 3 * 4)):
        assert row_cost(config, wish("a", 9, 0, scored=scored), 5) == cost


@pytest.mark.parametrize("cost", [1, 2, 3])
@pytest.mark.parametrize("before", [0, 1])
def test_a_scored_token_takes_its_cost_of_the_budget(before: int, cost: int) -> None:
    """But for the first one of its row; the rest of the budget is for other rows."""
    bench = Bench(evolve(CONFIG, scored_cost=cost))
    budget = CONFIG.max_num_batched_tokens
    plain = [wish(f"p{i}", 1, 9, scored=False) for i in range(before)]
    if plain:
        bench.turn(*map(Submit, plain))
    bench.turn(Submit(wish("a", 60, 0, scored=True)))
    bench.turn()
    for plan in bench.plans[-2:]:  # its first chunk, and the next one
        assert max(plan.num_scheduled_tokens) == 1 + (budget - before - 1) // cost
    served(bench)
