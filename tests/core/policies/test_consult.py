"""A policy's answers: taken if they can be used, and otherwise overridden,
with a reason.
"""

import math
from typing import Any

import pytest
from attrs import evolve

from minfer.planning.admit import current_load
from minfer.policies import consult
from minfer.policies.builtin import Priority
from minfer.records.messages import PolicyOverride, Submit
from minfer.records.policy import FirstCome, Load, Rank
from minfer.records.request import Request
from minfer.records.state import EngineState
from minfer.values.checks import MAX_INT64
from tests.core.test_engine import CONFIG, Bench, ask


class Says(FirstCome):
    """Answers every question alike, or raises."""

    def __init__(self, answer: Any) -> None:
        object.__setattr__(self, "answer", answer)

    def _say(self, *_: Any, **__: Any) -> Any:
        answer = vars(self)["answer"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    rank = requeue_rank = admit_from = admitted = ended = victim = may_preempt = (
        budget
    ) = _say
    defer = drafts = _say


def crowd() -> EngineState:
    """Three run, with ranks 0, 1 and 5, and one of rank 3 waits."""
    bench = Bench(evolve(CONFIG, max_num_seqs=3, policy=Priority()))
    bench.give(*(Submit(ask(f"r{p}", 4, 9, priority=p)) for p in (0, 1, 5)))
    first = bench.state
    assert len(first.running) == 3
    line = Bench(evolve(CONFIG, max_num_seqs=1, policy=Priority()))
    line.give(Submit(ask("first", 4, 9)), Submit(ask("waits", 4, 9, priority=3)))
    return evolve(first, waiting=line.state.waiting)


def requested(question: str, answer: Any) -> tuple[Any, list[PolicyOverride]]:
    """What a question comes to, and why it was overridden."""
    config, state = evolve(CONFIG, policy=Says(answer)), crowd()
    request, now = ask("new", 4, 9, priority=2), current_load(CONFIG, state)
    found: Any
    after: Any
    if question == "rank":
        found, after = consult.rank(config, state, request, consult.last_rank(state))
    elif question == "requeue_rank":
        found, after = consult.requeue_rank(config, state, (4.0,), request, 1.0, 2)
    elif question == "admit_from":
        found, after = consult.admit_from(config, state, now)
    elif question == "victim":
        found, after = consult.victim(config, state)
    elif question == "may_preempt":
        found, after = consult.may_preempt(config, state, state.waiting.first().place)
    elif question == "defer":
        found, after = consult.defer(config, state, request, now, 2)
    elif question == "budget":
        found, after = consult.budget(config, state, now)
    elif question == "drafts":
        found, after = consult.drafts(config, state, now, 4)
    elif question == "admitted":
        after = consult.admitted(config, state, (1.0,), request, now)
        found = after.policy
    else:
        after = consult.ended(config, state, request, 3, ran=True)
        found = after.policy
    return found, list(after.overrides)


@pytest.mark.parametrize(
    ("question", "answer", "found"),
    [
        ("rank", ((2.0, 1), "new"), (2.0, 1)),
        ("rank", ((-math.inf,), None), (-math.inf,)),
        ("requeue_rank", (3.0,), (3.0,)),
        ("requeue_rank", (9.0,), (4.0,)),  # never behind its old place
        ("admit_from", 7, 7),
        ("admit_from", -math.inf, -math.inf),
        ("admit_from", math.inf, math.inf),
        ("admit_from", -(2**63), -(2**63)),
        ("admit_from", MAX_INT64, MAX_INT64),
        ("victim", 1, 1),
        ("victim", 2, 2),
        ("may_preempt", True, True),
        ("may_preempt", False, False),
        ("defer", (True, "new"), True),
        ("defer", (False, "new"), False),
        ("budget", 7, 7),
        ("budget", 10**9, 16),
        ("budget", 0, 0),
        ("budget", -5, 0),
        ("drafts", 3, 3),
        ("drafts", 9, 4),
        ("drafts", -5, 0),
        ("admitted", "new", "new"),
        ("ended", "new", "new"),
    ],
)
def test_an_answer_that_can_be_used_is_taken(
    question: str, answer: Any, found: Any
) -> None:
    assert requested(question, answer) == (found, [])


@pytest.mark.parametrize(
    ("question", "answer", "instead", "why"),
    [
        ("rank", None, (5.0,), "returned no pair of rank and state"),
        ("rank", ((1.0,),), (5.0,), "returned no pair of rank and state"),
        ("rank", [(1.0,), None], (5.0,), "returned no pair of rank and state"),
        ("rank", ((math.nan,), None), (5.0,), "returned NaN"),
        ("rank", ((1.0, "a"), None), (5.0,), "returned a str"),
        ("rank", ([1.0], None), (5.0,), "returned a list"),
        ("requeue_rank", None, (4.0,), "returned a NoneType"),
        ("requeue_rank", (1.0, math.nan), (4.0,), "returned NaN"),
        ("admit_from", math.nan, 1.0, "returned NaN"),
        ("admit_from", None, 1.0, "returned a NoneType"),
        ("admit_from", 2**63, 1.0, "returned a number too large to hold"),
        ("admit_from", -(2**63) - 1, 1.0, "returned a number too large to hold"),
        ("victim", 0, 2, "chose nobody who may"),
        ("victim", 3, 2, "chose nobody who may"),
        ("victim", -1, 2, "chose nobody who may"),
        ("victim", 1.0, 2, "returned a float"),
        ("victim", True, 2, "returned a bool"),
        ("may_preempt", 1, False, "returned a int"),
        ("may_preempt", None, False, "returned a NoneType"),
        ("defer", True, False, "returned no pair of yes or no and state"),
        ("defer", (True,), False, "returned no pair of yes or no and state"),
        ("rank", ((1.0,), None, None), (5.0,), "returned no pair of rank and state"),
        (
            "defer",
            (True, None, None),
            False,
            "returned no pair of yes or no and state",
        ),
        ("defer", [True, None], False, "returned no pair of yes or no and state"),
        ("defer", (1, None), False, "returned a int"),
        ("budget", 2.5, 16, "returned a float"),
        ("budget", math.nan, 16, "returned a float"),
        ("budget", 2**63, 16, "returned a number too large to hold"),
        ("drafts", None, 4, "returned a NoneType"),
        ("drafts", True, 4, "returned a bool"),
        ("drafts", 2.0, 4, "returned a float"),
    ],
)
def test_an_answer_that_is_none_gives_way_to_first_come(
    question: str, answer: Any, instead: Any, why: str
) -> None:
    assert requested(question, answer) == (instead, [PolicyOverride(question, why)])


@pytest.mark.parametrize(
    ("question", "instead"),
    [
        ("rank", (5.0,)),
        ("requeue_rank", (4.0,)),
        ("admit_from", 1.0),
        ("victim", 2),
        ("may_preempt", False),
        ("defer", False),
        ("budget", 16),
        ("drafts", 4),
        ("admitted", None),
        ("ended", None),
    ],
)
def test_a_policy_that_raises_gives_way_to_first_come(
    question: str, instead: Any
) -> None:
    assert requested(question, KeyError("no")) == (
        instead,
        [PolicyOverride(question, "raised KeyError")],
    )


class _UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("k"), "'k'"),
        (ValueError("x" * 999), "x" * 197 + "..."),
        (_UnspeakableError(), ""),
    ],
)
def test_what_a_policy_raised_is_reported_with_its_line(
    error: Exception, text: str
) -> None:
    _, (reported,) = requested("budget", error)
    assert reported.error == text
    assert reported.line.startswith(f"{__file__}, line ")
    assert requested("budget", 5.5)[1] == [PolicyOverride("budget", "returned a float")]


class _UntracedError(Exception):
    __traceback__ = None


def test_what_was_raised_nowhere_is_reported_without_a_line() -> None:
    _, (reported,) = requested("budget", _UntracedError("x"))
    assert (reported.error, reported.line) == ("x", "")


def test_a_rank_instead_is_that_of_the_last_who_waits_or_runs() -> None:
    config, state = evolve(CONFIG, policy=Says(None)), crowd()
    request = ask("new", 4, 9)
    assert consult.rank(config, state, request, consult.last_rank(state))[0] == (5.0,)
    empty = Bench(config).state
    assert consult.rank(config, empty, request, consult.last_rank(empty))[0] == ()
    runs_first = evolve(empty, waiting=state.waiting)
    assert consult.rank(config, runs_first, request, consult.last_rank(runs_first))[
        0
    ] == (3.0,)
    first = state.waiting.first()
    late = evolve(first, place=((9.0,), *first.place[1:]))
    assert consult.last_rank(evolve(state, waiting=state.waiting.insert(late))) == (9.0,)


def test_a_new_rank_brings_the_policys_new_state() -> None:
    config = evolve(CONFIG, policy=Says(((1.0,), "new")))
    assert consult.rank(config, crowd(), ask("new", 4, 9), ())[1].policy == "new"


def test_a_policy_that_defers_learns_from_being_consulted() -> None:
    state = crowd()
    now, request = current_load(CONFIG, state), ask("new", 4, 9)
    says = evolve(CONFIG, policy=Says((True, "new")))
    assert consult.defer(says, state, request, now, 0)[1].policy == "new"
    wrong = evolve(CONFIG, policy=Says((1, "new")))
    assert consult.defer(wrong, state, request, now, 0)[1].policy is state.policy


def test_whom_the_first_in_line_would_displace_is_the_last_that_runs() -> None:
    config = evolve(CONFIG, policy=Priority())
    first = crowd().waiting.first().place
    assert consult.may_preempt(config, crowd(), first)[0], "3 against 5"
    run = crowd().running
    ahead = evolve(crowd(), running=type(run)(*(c[:2] for c in _columns(run))))
    assert not consult.may_preempt(config, ahead, first)[0], "3 against 1"
    assert not consult.may_preempt(evolve(CONFIG, policy=Says(True)), ahead, first)[0], (
        "whatever it says"
    )


def _columns(run: Any) -> list[Any]:
    return [getattr(run, column.name) for column in type(run).__attrs_attrs__]


class Tells(FirstCome):
    """Shows what it was asked."""

    def victim(self, state: Any, ranks: tuple[Rank, ...]) -> int:
        del state
        assert ranks == ((0.0,), (1.0,), (5.0,))
        return 1

    def budget(self, state: Any, load: Load) -> int:
        del state, load
        return 0


def test_a_victim_is_chosen_by_the_ranks_of_all_that_run() -> None:
    assert consult.victim(evolve(CONFIG, policy=Tells()), crowd())[0] == 1


def test_while_nothing_runs_a_step_takes_a_token() -> None:
    config = evolve(CONFIG, policy=Tells())
    state = Bench(config).state
    assert consult.budget(config, state, current_load(config, state))[0] == 1
    bench = Bench(config)
    bench.give(Submit(ask("a", 4, 2)))
    bench.drain()
    assert bench.ended["a", 0].reason == "length"


def test_an_overridden_answer_is_reported_with_the_turn_and_not_kept() -> None:
    bench = Bench(evolve(CONFIG, policy=Says(None)))
    bench.give(Submit(ask("a", 4, 3)))
    first = {one.question for one in bench.reasons_of(PolicyOverride)}
    assert {"rank", "admit_from", "budget"} <= first
    assert not bench.state.overrides
    bench.drain()
    assert bench.ended["a", 0].reason == "length"


class Half(FirstCome):
    """Has an answer only for priorities from 0 on."""

    def rank(self, state: Any, request: Request, time: float) -> tuple[Rank, Any]:
        del time
        if request.priority < 0:
            raise ValueError(request.priority)
        return (float(request.priority),), (*(state or ()), request.id)


def test_who_gets_no_rank_is_behind_all_that_came_before_in_the_same_turn_too() -> None:
    bench = Bench(evolve(CONFIG, max_num_seqs=1, policy=Half()))
    bench.give(Submit(ask("runs", 4, 9)))
    bench.give(*(Submit(ask(f"r{p}", 4, 9, priority=p)) for p in (7, -1, 3, -1 - 1)))
    line = [(seq.request.id, seq.place) for seq in bench.state.waiting]
    assert line == [
        ("r3", ((3.0,), 3, 0)),
        ("r7", ((7.0,), 1, 0)),
        ("r-1", ((7.0,), 2, 0)),
        ("r-2", ((7.0,), 4, 0)),
    ]
    assert bench.state.policy == ("runs", "r7", "r3")
    why = PolicyOverride("rank", "raised ValueError")
    assert bench.reasons_of(PolicyOverride) == [why, why]
