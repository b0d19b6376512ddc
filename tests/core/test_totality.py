"""No event makes the engine raise: absurd values, wrong types, and no
events.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from attrs import evolve, fields, frozen
from hypothesis import given

from minfer.engine import step
from minfer.journal.decisions import compact, extend_digest, facts
from minfer.journal.format import MAGIC, Head
from minfer.journal.redact import redacted
from minfer.journal.replay import Journal
from minfer.journal.writing import head_record, turn_record
from minfer.policies.builtin import POLICIES, Priority
from minfer.records.config import EngineConfig
from minfer.records.messages import (
    Cancel,
    Discarded,
    Executed,
    Failed,
    Finish,
    Ignored,
    Lost,
    Moved,
    Pause,
    PolicyOverride,
    Propose,
    Submit,
    Tick,
)
from minfer.records.policy import FirstCome, Policy
from minfer.records.request import Continuation, ParameterError, Request, SamplingParams
from minfer.records.state import EngineState, Turn
from minfer.records.tiers import ExternalStore, HostTier
from minfer.records.token_logprobs import TokenLogprobs
from minfer.sampling.beam import BeamRound
from minfer.testing.invariants import check
from tests.core.journal.made import opened
from tests.core.test_engine import CONFIG, Bench, ask

HUGE = 10**5000  # too long for Python to write out


class Whole:
    """Says that it is a whole number, and cannot be looked up in a set."""

    __hash__ = None  # type: ignore[assignment]  # that is the point

    def __eq__(self, other: object) -> bool:
        return self is other

    def __index__(self) -> int:
        return 3


class Later(Tick):
    """An event of a kind of its own."""


def kind_of(value: object) -> str:
    """A name for a test's parameter that can be written out, whatever it is."""
    return value if type(value) is str and value.isidentifier() else type(value).__name__


class Odd:
    """An object that raises whatever is done with it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no iteration")


numbers = st.sampled_from(
    (
        0,
        1,
        -1,
        HUGE,
        -HUGE,
        10**400,
        2**53,
        2**63,
        0.5,
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        True,
    )
)
others: st.SearchStrategy[Any] = (
    st.sampled_from(
        (
            None,
            "",
            "x",
            "\ud800",
            b"",
            b"x" * 32,
            (),
            (1,),
            ((1,),),
            [],
            [1],
            {},
            frozenset(),
        )
    )
    | st.builds(Odd)
    | st.builds(iter, st.just((1, 2)))
)
anything = numbers | others
floats = st.integers(0, 9).map(float)


def made(kind: Callable[..., Any], values: dict[str, st.SearchStrategy[Any]]) -> Any:
    """Events of a kind; None where making one is refused, as it must be by a
    ValueError.
    """

    def build(given: dict[str, Any]) -> Any:
        try:
            return kind(**given)
        except ValueError:
            return None

    return st.fixed_dictionaries(values).map(build)


def mostly(right: Any) -> st.SearchStrategy[Any]:
    """A right value, or anything."""
    return st.just(right) | st.just(right) | st.just(right) | anything


_requests = made(
    Request,
    {
        "id": mostly("new"),
        "prompt": mostly((1, 2, 3)),
        "max_tokens": mostly(4),
        "stop_ids": mostly(frozenset({2})),
        "n": mostly(2),
        "seed": mostly(7),
        "sampling": mostly(SamplingParams()),
        "priority": mostly(1),
        "client": mostly("c"),
        "deadline": mostly(3.0),
        "root": mostly(b"root"),
        "keys": mostly(()),
        "output": mostly(()),
    },
)
_results = (
    mostly(((1,), (2,), (3,)))
    | st.sampled_from(
        (
            [(1,), (2,), (3,)],
            ([1], (2,), (3,)),
            ((True,), (2,), (3,)),
            ((1,), (2,), (2**40,)),
            {(1,): 0, (2,): 0, (3,): 0},
            ((1.0,), (2,), (3,)),
        )
    )
    | st.builds(lambda: ((Whole(),), (2,), (3,)))
)
# Of each row a token, or what is none; odd ones are of rows of a search, too.
_logprobs = st.tuples(*[st.just(()) | st.tuples(mostly(TokenLogprobs(1, -1.0, 1)))] * 3)
_logprobs |= st.builds(
    lambda *values: ((), (), (TokenLogprobs(*values),)),
    mostly(3),
    mostly(-1.0),
    mostly(1),
    mostly(()),
    mostly(()),
)
events = st.one_of(
    made(Tick, {"time": anything}),
    made(Submit, {"request": _requests | anything}),
    made(Cancel, {"id": mostly("x") | mostly("unknown")}),
    made(
        Finish,
        {
            "id": mostly("x"),
            "sample": mostly(0),
            "length": mostly(1),
            "reason": mostly("stop"),
        },
    ),
    made(
        Pause,
        {"id": mostly("x") | mostly("xxx"), "sample": mostly(0), "paused": mostly(True)},
    ),
    made(
        Executed,
        {
            "step": st.integers(0, 9) | floats | anything,
            "yields": _results,
            "logprobs": mostly(()) | _logprobs,
            "pooled": mostly(()),
        },
    ),
    made(Moved, {"number": st.integers(0, 3) | anything}),
    made(Lost, {"number": st.integers(0, 3) | anything, "error": mostly("full")}),
    made(
        Propose,
        {
            "id": mostly("x"),
            "sample": mostly(0),
            "known": mostly(6),
            "tokens": mostly((1, 2)),
        },
    ),
    made(
        Failed, {"step": st.integers(0, 9) | floats | anything, "error": mostly("boom")}
    ),
    st.builds(Later, st.just(3.0)),
    st.integers(0, 99).map(Tick),
    anything,
)


def busy(*, tiers: bool = False) -> tuple[EngineConfig, EngineState]:
    """An engine in the midst of things: some run, of which one is a beam, some wait; with
    `tiers`, blocks are on their way to them.
    """
    bench = Bench(evolve(CONFIG, depth=2))
    if tiers:
        host, external = (
            HostTier(pages=64, storing=1),
            ExternalStore(max_known_keys=64, storing=2),
        )
        bench = Bench(evolve(bench.config, host=host, external_store=external))
    search = BeamRound(id="search", width=2, prompt=5, most=12)
    for n in range(1, 7):
        request = ask(
            "x" * n,
            5,
            12,
            needs_host_mask=n == 3,
            continuation=Continuation(beam_round=search if n == 2 else None),
        )
        bench.give(Submit(request))
    for _ in range(4):
        bench.turn()
    assert bool(bench.state.tiers.transfers) == tiers
    return bench.config, bench.state


@pytest.mark.long
@pytest.mark.parametrize("tiers", [False, True])
@given(st.lists(events, max_size=6))
def test_whatever_comes_the_engine_answers_and_its_journal_replays(
    tiers: bool,
    reported: list[Any],
) -> None:
    config, state = busy(tiers=tiers)
    turns = list[Turn]()
    for some in (tuple(reported[:3]), tuple(reported[3:])):
        after = step(config, state, some)
        check(config, after.state)
        turns.append(Turn(len(turns), state, some, after))
        state = after.state
    head = Head(config=config, state=turns[0].before)
    journal = journalled(head, turns)
    assert [turn.transition.state for turn in journal.turns()] == [
        turn.transition.state for turn in turns
    ]
    for turn in turns:
        redacted(config, turn.before, turn.events, b"secret")


def journalled(head: Head, turns: list[Turn]) -> Journal:
    """A journal that begins in the midst of things."""
    data, digest = [MAGIC, head_record(head)], head.digest
    for turn in turns:
        record = compact(facts(turn.before, turn.transition))
        digest = extend_digest(digest, turn.transition, record)
        data.append(turn_record(turn, record, digest))
    return opened(b"".join(data))


@pytest.mark.parametrize("event", [None, 3, "submit", (), object(), Odd(), Request])
def test_what_is_no_event_is_ignored_by_name(event: Any) -> None:
    config, state = busy()
    turn = step(config, state, (event,))
    assert turn.state == step(config, state, ()).state
    (ignored,) = (r for r in turn.reasons if isinstance(r, Ignored))
    assert ignored.event == "event"
    assert ignored.detail == f"a {type(event).__name__} is no event"


@pytest.mark.parametrize(
    "yields",
    [
        None,
        3,
        "abc",
        [(1,)],
        iter([(1,)]),
        ((1,), [2]),
        ((1,), None),
        (("a",),),
        Odd(),
        (Odd(),),
    ],
    ids=kind_of,
)
def test_results_that_are_none_fail_their_step(yields: Any) -> None:
    config, state = busy()
    number = state.inflight[0].step
    turn = step(config, state, (Executed(number, yields),))
    check(config, turn.state)
    (discarded,) = (r for r in turn.reasons if isinstance(r, Discarded))
    assert discarded.step == number


@pytest.mark.parametrize("error", [None, 7, b"boom", Odd()], ids=kind_of)
def test_a_failure_without_a_text_is_a_failure_all_the_same(error: Any) -> None:
    config, state = busy()
    turn = step(config, state, (Failed(state.inflight[0].step, error),))
    (discarded,) = (r for r in turn.reasons if isinstance(r, Discarded))
    assert discarded.error == f"a {type(error).__name__}"


@pytest.mark.parametrize("number", [None, "0", 0.5, Odd(), True, HUGE], ids=kind_of)
@pytest.mark.parametrize("kind", [Executed, Failed])
def test_a_step_of_no_known_number_is_ignored(kind: Any, number: Any) -> None:
    config, state = busy()
    turn = step(config, state, (kind(number, ()),))
    assert any(isinstance(r, Ignored) for r in turn.reasons)
    assert not any(isinstance(r, Discarded) for r in turn.reasons)


@pytest.mark.parametrize(
    ("kind", "values", "named"),
    [
        (Finish, ("x", 0, HUGE), "length"),
        (Pause, (3, 0), "id"),
        (Pause, ("x", None), "sample"),
        (Pause, ("x", HUGE), "sample"),
        (Finish, ("x", 0, 1, "rejected"), "reason"),
    ],
    ids=kind_of,
)
def test_a_wrong_value_is_refused_when_an_event_is_made(
    kind: Any, values: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(ParameterError, match=named) as caught:
        kind(*values)
    assert caught.value.param == named


def test_lists_are_no_tokens_where_there_are_two_of_them() -> None:
    lists: Any = [1, 2]
    with pytest.raises(ParameterError, match="in a tuple"):
        Request(id="x", prompt=lists, output=lists, max_tokens=4)
    with pytest.raises(ParameterError, match="deadline"):
        Request(id="x", prompt=(1,), max_tokens=4, deadline=HUGE)


def test_times_are_kept_as_journals_give_them_back() -> None:
    assert [type(Tick(time).time) for time in (2, 2.0, 2**63)] == [float] * 3
    assert type(evolve(ask("x"), deadline=3).deadline) is float


def test_every_field_of_a_request_is_checked() -> None:
    for field in (f.name for f in fields(Request) if f.init):
        wrong: dict[str, Any] = {field: Odd()}
        with pytest.raises(ParameterError):
            evolve(ask("x"), **wrong)


@pytest.mark.parametrize("policy", [kind() for kind in POLICIES.values()], ids=str)
def test_extremes_that_are_legal_are_served(policy: Any) -> None:
    """The largest and the smallest that a request may say, under every policy."""
    bench = Bench(evolve(CONFIG, policy=policy))
    extremes: tuple[dict[str, Any], ...] = (
        {"priority": 2**53, "deadline": math.inf},
        {"priority": -(2**53), "deadline": 0.0},
        {"max_tokens": 2**63 - 1, "deadline": 5e-324},
    )
    for number, changes in enumerate(extremes):
        bench.turn(
            Submit(evolve(ask(f"r{number}", 5, 4), **changes)), Tick(1e300 * number)
        )
    bench.drain()
    assert not any(isinstance(r, PolicyOverride) for r in bench.reasons)


# --- policies that answer nonsense ------------------------------------------------------


@frozen
class Says(FirstCome):
    """Answers one question with the same thing, whatever it is; raises if that is an
    exception.
    """

    question: str
    answer: Any

    def __getattribute__(self, name: str) -> Any:
        if name != object.__getattribute__(self, "question"):
            return object.__getattribute__(self, name)
        answer = object.__getattribute__(self, "answer")

        def say(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return say


NONSENSE = (
    None,
    math.nan,
    "x",
    10**400,
    (math.nan,),
    ((math.nan,), None),
    KeyError("x"),
    Odd(),
)
QUESTIONS = ("rank", "requeue_rank", "admit_from", "victim", "may_preempt", "budget")


def tight(policy: Any) -> Bench:
    """An engine in which every question is asked: few blocks, and an urgent request that
    waits.
    """
    config = evolve(CONFIG, num_blocks=8, max_num_seqs=3, policy=policy)
    bench = Bench(config)
    bench.give(*(Submit(ask(f"r{n}", 6, 20)) for n in range(3)))
    for _ in range(4):
        bench.turn()
    bench.turn(Submit(evolve(ask("urgent", 9, 4), priority=-1)))
    return bench


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("answer", NONSENSE, ids=kind_of)
def test_a_bad_answer_means_first_come_and_a_reason_says_so(
    question: str, answer: Any
) -> None:
    class Both(Says, Priority):
        """Priorities, so that a sample may be preempted."""

    kind = Both if question == "may_preempt" else Says
    bench = tight(kind(question, answer))
    bench.drain()
    reported = {r.question for r in bench.reasons if isinstance(r, PolicyOverride)}
    assert reported == {question}
    assert len(bench.ended) == 4
    if kind is Says:
        plain = tight(FirstCome())
        plain.drain()
        assert bench.out == plain.out
        assert bench.plans == plain.plans


@pytest.mark.parametrize("question", ["admitted", "ended"])
def test_a_policy_that_raises_in_a_notification_keeps_its_state(
    question: str,
) -> None:
    bench = tight(Says(question, RuntimeError("no")))
    bench.drain()
    assert {r.question for r in bench.reasons if isinstance(r, PolicyOverride)} == {
        question
    }
    assert bench.state.policy is None


def test_a_policy_without_methods_is_first_come() -> None:
    bench = Bench(CONFIG)
    bench.config = evolve(CONFIG, policy=cast(Policy, object()))
    bench.give(Submit(ask("x", 5, 6)))
    bench.drain()
    assert bench.ended["x", 0].reason == "length"


def test_reasons_name_no_addresses_so_that_journals_replay() -> None:
    bench = tight(Says("rank", object()))
    assert {r.why for r in bench.reasons if isinstance(r, PolicyOverride)} == {
        "returned no pair of rank and state"
    }
