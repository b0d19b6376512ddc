"""Plans that are wrong on purpose are named."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from attrs import evolve

from minfer.engine import step
from minfer.planning import schedule as scheduling
from minfer.records.messages import Discarded, Execute, Executed, Pause, Submit, Tick
from minfer.records.plan import PrefillTokens
from minfer.records.request import PromptOnly
from minfer.records.state import Transition, Turn
from minfer.records.token_logprobs import TokenLogprobs
from minfer.testing.invariants import InvariantError
from minfer.testing.ledger import check_turn
from minfer.testing.result_laws import is_valid_result
from tests.core.test_engine import CONFIG, Bench, ask
from tests.core.testing.turns import (
    FAILED,
    Bite,
    as_it_is,
    bitten,
    decoding,
    fills,
    grown,
    grows,
    has,
    named,
    planned,
    plans,
    played,
    sent,
    stated,
    without_row,
)

BITES = (
    Bite(
        "plan: a sequence in the wrong row",
        decoding,
        lambda t: planned(t, rows=plans(t)[-1].rows[::-1]),
    ),
    Bite(
        "plan: a row without",
        decoding,
        lambda t: sent(t, run_ids=(999, *plans(t)[-1].run_ids[1:])),
    ),
    Bite(
        "plan: a row starts at",
        decoding,
        lambda t: planned(t, starts=(0, *plans(t)[-1].starts[1:])),
    ),
    Bite("plan: its number", decoding, lambda t: planned(t, step=99)),
    Bite("plan: columns", decoding, lambda t: sent(t, max_sampled_tokens=(1,))),
    Bite(
        "feed: host or device",
        decoding,
        lambda t: planned(t, fills=(PrefillTokens(0, (1,)),)),
    ),
    Bite(
        "feed: not the history",
        fills,
        lambda t: planned(
            t, fills=tuple(evolve(f, tokens=f.tokens[::-1]) for f in plans(t)[-1].fills)
        ),
    ),
    Bite(
        "feed: only the end",
        fills,
        lambda t: sent(
            t, max_sampled_tokens=tuple(1 - m for m in plans(t)[-1].max_sampled_tokens)
        ),
    ),
    Bite(
        "decode",
        decoding,
        lambda t: sent(
            t, max_sampled_tokens=tuple(2 for _ in plans(t)[-1].max_sampled_tokens)
        ),
    ),
    Bite("budget: .* allows 1", lambda t: t.number == 0, as_it_is, budgets=(1,)),
    Bite(
        "budget: .* a prompt waits",
        lambda t: t.number == 0,
        as_it_is,
        budgets=(64,),
        judged=evolve(CONFIG, max_num_batched_tokens=64),
    ),
    Bite(
        "itl: 11 prefill tokens are expected",
        lambda t: t.number == 1,
        as_it_is,
        judged=evolve(CONFIG, itl_target=1.0, min_prefill_tokens=1),
    ),
    Bite(
        "itl: 12 tokens of budget beside 1 rows",
        lambda t: t.number == 1,
        as_it_is,
        judged=evolve(CONFIG, itl_target=1.0, min_prefill_tokens=12),
        budgets=(12,),
    ),
    Bite("left out", decoding, without_row),
    Bite(
        "fault: ",
        has(Discarded),
        as_it_is,
        script=FAILED,
        judged=evolve(CONFIG, max_failures=2),
    ),
    Bite("grow", grows, lambda t: grown(t, at=1)),
    Bite("grow", grows, lambda t: grown(t, row=3)),
)


@pytest.mark.parametrize("bite", BITES, ids=named(BITES))
def test_a_wrong_turn_is_named(bite: Bite) -> None:
    bitten(bite)


def in_lockstep() -> Turn:
    """A turn in which a row is planned that may not run ahead, and decodes."""
    bound = Submit(evolve(ask("x", 5, 9), needs_host_mask=True))
    turns = played(evolve(CONFIG, depth=2), (bound,))
    return next(turn for turn in turns if turn.number > 1 and plans(turn))


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        ("apart", lambda turn: planned(turn, deferred=())),
        ("needs_host_mask", lambda turn: stated(turn, needs_host_mask=False)),
    ],
)
def test_a_row_that_may_not_run_ahead_has_deferred_sampling_and_is_checked(
    law: str, wrong: Callable[[Turn], Transition]
) -> None:
    turn = in_lockstep()
    assert plans(turn)[-1].deferred == (0,)
    with pytest.raises(InvariantError, match=law):
        check_turn(evolve(CONFIG, depth=2), turn.before, turn.events, wrong(turn))


def test_who_may_not_run_ahead_is_not_planned_ahead() -> None:
    """A schedule that forgets it plans the row twice."""
    bound = Submit(evolve(ask("x", 5, 9), needs_host_mask=True))
    config = evolve(CONFIG, depth=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "_rows_too_far_ahead", lambda _: [])
        turns = [*islice(played(config, (bound,)), 5)]
    wrong = next(turn for turn in turns if len(turn.transition.state.inflight) == 2)
    with pytest.raises(InvariantError, match="ahead"):
        check_turn(config, wrong.before, wrong.events, wrong.transition)


def test_who_is_paused_is_not_planned() -> None:
    """A schedule that forgets it plans what yields."""
    bound = Submit(evolve(ask("x", 5, 9), needs_host_mask=True))
    script = (bound,), (), (), (Pause("x", 0),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "paused_rows", lambda *_: [])
        turns = [*islice(played(CONFIG, *script), 5)]
    wrong = turns[3]
    with pytest.raises(InvariantError, match="paused"):
        check_turn(CONFIG, wrong.before, wrong.events, wrong.transition)


def test_who_goes_on_is_planned() -> None:
    """A schedule that remembers it too long leaves out who could run."""
    bound = Submit(evolve(ask("x", 5, 9), needs_host_mask=True))
    script = (bound,), (), (Pause("x", 0),), (), (Pause("x", 0, paused=False),)
    turns = [*islice(played(CONFIG, *script), 5)]
    assert plans(turns[4])
    wrong = step(CONFIG, turns[4].before, ())
    kept = evolve(wrong, state=evolve(wrong.state, time=5.0, paused=frozenset()))
    with pytest.raises(InvariantError, match="work conservation"):
        check_turn(CONFIG, turns[4].before, turns[4].events, kept)


@pytest.mark.parametrize("how", ["last", "mean"])
def test_a_row_that_is_pooled_is_opened_so_and_yields_nothing(how: str) -> None:
    bench = Bench()
    submit = Submit(ask("x", 9, 0, prompt_only=PromptOnly(how)))
    before = bench.state
    made = bench.give(submit)
    events = (Tick(bench.clock), submit)
    check_turn(CONFIG, before, events, made)
    (plan,) = (c.plan for c in made.commands if isinstance(c, Execute))
    opened = evolve(plan.opens[0], pooling="")
    for law, wrong in (
        ("open", evolve(plan, opens=(opened,))),
        ("feed", evolve(plan, max_sampled_tokens=(1,))),
    ):
        state = evolve(made.state, inflight=(wrong,))
        turn = evolve(made, state=state, commands=(Execute(wrong),))
        with pytest.raises(InvariantError) as caught:
            check_turn(CONFIG, before, events, turn)
        assert caught.value.law in (law, "coverage")


# --- results ----------------------------------------------------------------------------


class Whole(int):
    """A whole number that is none of the plain ones."""


ONE = TokenLogprobs(3, -1.0, 1)
ODD: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, {}),
    (True, {"logprobs": ((ONE,), (), (ONE,))}),
    (True, {"pooled": (b"", b"x", b"")}),
    (False, {"yields": ((True,), (1,), (2,))}),
    (False, {"yields": ((1,), (False,), (2,))}),
    (False, {"yields": ((Whole(1),), (1,), (2,))}),
    (False, {"yields": ((1.0,), (1,), (2,))}),
    (False, {"yields": ((), (1,), (2,))}),
    (False, {"yields": ((1, 1), (1,), (2,))}),
    (False, {"yields": ((1,), (2,))}),
    (False, {"yields": ([1], (1,), (2,))}),
    (False, {"yields": [(1,), (1,), (2,)]}),
    (False, {"yields": ((-1,), (1,), (2,))}),
    (False, {"yields": ((50,), (1,), (2,))}),
    (False, {"logprobs": ((ONE,), (ONE,))}),
    (False, {"logprobs": ((ONE, ONE), (), ())}),
    (False, {"logprobs": ([ONE], (), ())}),
    (False, {"logprobs": None}),
    (False, {"pooled": (b"x",)}),
    (False, {"pooled": (bytearray(b"x"), b"", b"")}),
    (False, {"pooled": ("x", b"", b"")}),
    (False, {"pooled": None}),
)


@pytest.mark.parametrize("case", range(len(ODD)))
def test_the_engine_and_its_judge_take_the_same_results(case: int) -> None:
    right, odd = ODD[case]
    bench = Bench(evolve(CONFIG, depth=1))
    bench.turn(*(Submit(ask("x" * n, 3, 12)) for n in (1, 2, 3)))
    bench.turn()
    before, (plan,) = bench.state, bench.state.inflight
    done = evolve(Executed(plan.step, ((3,), (4,), (5,))), **odd)
    events = (Tick(99.0), done)
    turn = step(bench.config, before, events)
    assert is_valid_result(bench.config, plan, done) is right
    assert any(isinstance(one, Discarded) for one in turn.reasons) is not right
    check_turn(bench.config, before, events, turn)
