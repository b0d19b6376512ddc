"""What results become: aligned with those who run now, cut at ends, counted against
failures.
"""

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import given

from minfer.blocks.keys import block_keys
from minfer.planning.commit import align_yields
from minfer.records.messages import (
    Cancel,
    Discarded,
    Emit,
    Ended,
    Executed,
    Ignored,
    Submit,
)
from minfer.records.speculation import DEVICE, Speculation
from minfer.records.token_logprobs import TokenLogprobs
from minfer.values import thresholds
from tests.core.test_engine import CONFIG, VOCAB, Bench, ask

# Decode rows yield several tokens a step, as most drafts are right.
SEVERAL = evolve(
    CONFIG,
    max_num_batched_tokens=64,
    speculation=Speculation(drafter=DEVICE, drafts=5, adaptive=False),
)


@given(
    st.permutations(range(10)),
    st.sets(st.integers(0, 9)),
    st.sets(st.integers(0, 9)),
    st.integers(1, 4),
)
def test_results_follow_their_generations_whatever_samples_came_or_went(
    order: list[int], left: set[int], came: set[int], window: int
) -> None:
    """However far apart they are, in windows of any size."""
    before = tuple(gen for gen in order if gen not in came - left)
    now = tuple(gen for gen in order if gen not in left)
    yields = tuple((gen, gen + 100) for gen in before)
    right = tuple((gen, gen + 100) if gen in before else () for gen in now)
    assert align_yields(before, now, yields, window) == right


def test_many_newcomers_in_front_do_not_hide_who_ran_before() -> None:
    assert align_yields((7,), (1, 2, 3, 4, 7), ((5,),), 2) == ((), (), (), (), (5,))
    assert align_yields((1, 2, 3, 4, 7), (7,), ((1,), (2,), (3,), (4,), (5,)), 2) == (
        (5,),
    )
    assert align_yields((), (1, 2), (), 2) == ((), ())
    assert align_yields((1, 2), (), ((1,), (2,)), 2) == ()


@pytest.mark.parametrize("others", [0, 3])
def test_log_probabilities_follow_their_tokens(others: int) -> None:
    """Whatever samples came or went since the step was planned, and as far as tokens
    count.
    """
    bench = Bench(evolve(SEVERAL, depth=2))
    early = ask("early", 5, 20)
    ends = frozenset(bench.right(early)[6:7])  # in the middle of a step
    bench.give(Submit(evolve(early, stop_ids=ends)))
    emitted: list[Emit] = []
    while bench.state.requests:
        done = bench.oracle.collect()
        assert isinstance(done, Executed)
        scored = tuple(tuple(TokenLogprobs(t, -t, 1) for t in row) for row in done.yields)
        late = [Submit(ask(f"late{len(emitted)}", 4, 6))] if len(emitted) < others else []
        turn = bench.give(evolve(done, logprobs=scored), *late)
        emitted += [one for one in turn.commands if isinstance(one, Emit)]
    assert bench.ended["early", 0].reason == "stop"
    for one in emitted:
        assert tuple(tuple(-t.logprob for t in row) for row in one.logprobs) == one.tokens


@pytest.mark.parametrize(
    "wrong",
    [
        ((),),
        ((1,), (1,)),
        ((1, 2),),
        ((VOCAB,),),
        ((-1,),),
        ([1],),
        ((1.5,),),
        ((2**32,),),
    ],
)
def test_what_no_row_can_yield_is_a_failed_step(wrong: object) -> None:
    bench = Bench()
    request = ask("a", 3, 4)
    bench.give(Submit(request))
    bench.oracle.collect()
    bench.give(Executed(0, wrong))  # type: ignore[arg-type]  # wrong on purpose
    assert len(bench.reasons_of(Discarded)) == 1
    assert bench.state.faults == ((("a", 0), 1),)
    bench.drain()
    assert bench.out["a", 0] == bench.right(request)


def test_the_largest_token_id_is_none_too_many_and_a_chunk_yields_nothing() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 20, 4)))  # more than a step's budget
    bench.oracle.collect()
    bench.give(Executed(0, ((1,),)))
    assert len(bench.reasons_of(Discarded)) == 1, "a chunk that goes on has no token"
    bench.turn()
    bench.oracle.collect()
    bench.give(Executed(bench.state.inflight[0].step, ((VOCAB - 1,),)))
    assert bench.out["a", 0] == (VOCAB - 1,)
    assert len(bench.reasons_of(Discarded)) == 1


def test_a_step_before_the_first_in_flight_is_ignored_and_one_after_it_fails() -> None:
    bench = Bench(evolve(CONFIG, depth=2))
    bench.give(Submit(ask("a", 3, 9)))
    bench.turn()
    bench.give(Executed(0, ((1,),)))
    assert isinstance(bench.reasons[-1], Ignored)
    assert not bench.reasons_of(Discarded)
    bench.give(Executed(2, ((1,),)))
    assert bench.reasons_of(Discarded) == [Discarded(2, "step 1 was skipped", 2, 1)]


def test_rows_short_of_their_most_give_back_what_was_reserved() -> None:
    bench = Bench(evolve(SEVERAL, depth=2))
    bench.give(Submit(ask("a", 4, 30)))
    bench.turn()
    bench.turn()
    run, first = bench.state.running, bench.state.inflight[0]
    assert first.max_sampled_tokens == (6,)
    bench.give(Executed(first.step, ((1,),)))
    after = bench.state.running
    ahead = sum(plan.max_sampled_tokens[0] for plan in bench.state.inflight)
    assert after.known[0] == run.known[0] + 1
    assert after.scheduled[0] == after.known[0] - 1 + ahead


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fresh_tokens_join_the_tails_every_so_many_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr(thresholds, "FRESH_STEPS", steps)
    bench = Bench(evolve(CONFIG, block_size=32))
    bench.give(Submit(ask("a", 3, 20)))
    for _ in range(10):
        bench.turn()
        assert len(bench.state.running.fresh[0]) <= steps
    assert bench.state.running.tokens(0, 32)[3:] == bench.out["a", 0]


def test_tokens_after_the_last_one_and_after_a_stop_are_taken_back() -> None:
    plain = ask("a", 4, 6)
    right = Bench().right(plain)
    for request, keep in ((plain, 6), (evolve(plain, stop_ids=frozenset(right[2:3])), 0)):
        bench = Bench(SEVERAL)
        bench.give(Submit(request))
        bench.drain()
        kept = right[: keep or right.index(right[2]) + 1]
        assert bench.out["a", 0] == kept
        assert bench.ended["a", 0].length == len(kept)
        assert bench.ended["a", 0].reason == ("length" if keep else "stop")


def test_those_that_end_in_a_step_end_in_rank_order_whyever_they_end() -> None:
    """The first ends with its prompt, the second with its last token."""
    bench = Bench()
    bench.give(Submit(ask("prompt", 4, 0)), Submit(ask("token", 4, 1)))
    bench.turn()
    assert [one.id for one in bench.reasons_of(Ended)] == ["prompt", "token"]


def test_an_emit_names_all_running_samples_and_ends_no_other() -> None:
    bench = Bench()
    bench.give(Submit(ask("a", 3, 2)), Submit(ask("bb", 3, 5)))
    bench.turn()
    turn = bench.turn()
    (emit,) = [c for c in turn.commands if isinstance(c, Emit)]
    assert emit.ids == (("a", 0), ("bb", 0))
    assert [len(tokens) for tokens in emit.tokens] == [1, 1]
    assert [(done.id, done.reason, done.length) for done in emit.finished] == [
        ("a", "length", 2)
    ]
    bench.turn(Cancel("bb"))
    assert not bench.state.requests


def test_what_is_published_at_an_end_is_of_the_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "FRESH_STEPS", 50)
    plain = ask("a", 5, 20)
    right, cut = Bench().right(plain), 0
    for stop in range(1, 16):
        request = evolve(plain, stop_ids=frozenset(right[stop : stop + 1]))
        bench = Bench(SEVERAL)
        bench.give(Submit(request))
        bench.drain()
        out = bench.out["a", 0]
        cut += sum(plan.max_sampled_tokens[0] for plan in bench.plans) > len(out)
        known = (*request.prompt, *out)
        assert set(bench.state.blocks.prefix.nodes) == set(block_keys(b"", known[:-1], 4))
    assert cut, "some of what came was taken back"
