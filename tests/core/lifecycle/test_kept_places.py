"""Requests that go on with the work of an earlier one, at its place in the waiting
queue.
"""

from typing import Any

import pytest
from attrs import evolve

from minfer.policies.builtin import POLICIES, Static, Window, policy_named
from minfer.policies.fair_queue import FairQueue
from minfer.records.messages import (
    Admitted,
    Cancel,
    Finish,
    Ignored,
    Pause,
    QueueBlocked,
    Submit,
)
from minfer.records.request import Continuation, Request
from minfer.values.checks import ParameterError
from tests.core.test_engine import CONFIG, Bench, ask

ONE = evolve(CONFIG, max_num_seqs=1)


def admitted(bench: Bench) -> list[str]:
    return [one.id for one in bench.reasons_of(Admitted)]


def placed(bench: Bench, first: str, name: str, beam: int = 0, **more: Any) -> Request:
    """A request at the place of one that is being served."""
    rank, arrival, _ = bench.state.requests[first].place
    return ask(
        name, max_tokens=1, continuation=Continuation(place=(rank, arrival, beam)), **more
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_it_goes_before_those_that_came_later(policy: str) -> None:
    bench = Bench(evolve(ONE, policy=policy_named(policy)))
    bench.give(Submit(ask("first", max_tokens=1)))
    rounds = [placed(bench, "first", f"next {beam}", beam) for beam in (1, 2, 3)]
    bench.give(*(Submit(ask(name, max_tokens=1)) for name in ("later", "last")))
    bench.give(*map(Submit, rounds))
    bench.drain()
    assert admitted(bench)[:4] == ["first", "next 1", "next 2", "next 3"]


def test_a_full_queue_does_not_refuse_it() -> None:
    bench = Bench(evolve(ONE, max_waiting=1))
    bench.give(Submit(ask("first")))
    bench.give(Submit(ask("waits")))
    bench.give(Submit(ask("refused")), Submit(placed(bench, "first", "next", 1)))
    assert "full" in bench.ended["refused", 0].error
    bench.drain()
    assert admitted(bench) == ["first", "next", "waits"]


def test_what_it_has_had_before_counts_once() -> None:
    """Prompt tokens and hits are those of the first request."""
    bench = Bench()
    bench.give(Submit(ask("first", 9, 1)))
    prompt = ask("first", 9).prompt
    bench.give(Submit(placed(bench, "first", "next", 1, prompt=prompt)))
    bench.drain()
    reported = [(one.prompt, one.cached, one.hit) for one in bench.reasons_of(Admitted)]
    assert reported == [(9, 0, 0), (0, 0, 8)]
    assert bench.ended["next", 0].cached == 0


def test_two_that_come_together_do_not_get_one_place() -> None:
    bench = Bench(ONE)
    bench.give(Submit(ask("first")))
    both = [placed(bench, "first", name, 1) for name in ("next", "twin")]
    bench.give(*map(Submit, both))
    assert len({seq.place for seq in bench.state.waiting}) == 2
    bench.drain()


def test_no_batch_is_waited_for() -> None:
    bench = Bench(evolve(CONFIG, policy=Static()))
    bench.give(Submit(ask("first", max_tokens=20)))
    bench.turn(Submit(ask("new")), Submit(placed(bench, "first", "next", 1)))
    assert admitted(bench) == ["first", "next"]


@pytest.mark.parametrize("owner", ["a", "b", None])  # who runs, who waits, and nobody
def test_a_place_that_is_another_ones_or_was_never_given_is_not_its(
    owner: str | None,
) -> None:
    """It comes last in its rank, as any other."""
    bench = Bench(evolve(ONE, policy=policy_named("priority")))
    bench.give(*(Submit(ask(name, max_tokens=1)) for name in "ab"))
    rank, arrival, sample = bench.state.requests[owner or "b"].place
    before_all = tuple([one - 1 for one in rank])
    wrong = (rank, arrival, sample) if owner else (before_all, arrival + 1, sample)
    bench.give(Submit(ask("c", max_tokens=1, continuation=Continuation(place=wrong))))
    places = [live.place for live in bench.state.requests.values()]
    assert len(set(places)) == len(places)
    bench.drain()
    assert admitted(bench) == ["a", "b", "c"]


def test_no_window_is_waited_for() -> None:
    bench = Bench(evolve(CONFIG, policy=Window(wait=100.0)))
    bench.give(Submit(ask("first", max_tokens=20)))
    bench.turn(Submit(placed(bench, "first", "next", 1)))
    assert admitted(bench) == ["first", "next"]
    bench.turn(Submit(ask("new")))
    assert admitted(bench) == ["first", "next"]
    assert [one.cause for one in bench.reasons_of(QueueBlocked)] == ["policy"]


def test_fair_shares_charge_its_prompt_once() -> None:
    policy = FairQueue()
    request = ask("a", 100, 1)
    _, state = policy.rank(policy.start(), request, 0.0)
    assert state.by_owner[0, ""].end == 101
    again = evolve(request, continuation=Continuation(place=((0.0, 0.0), 0, 1)))
    _, state = policy.rank(state, again, 0.0)
    assert state.by_owner[0, ""].end == 102
    state = policy.ended(state, again, 0, ran=False)
    assert state.by_owner[0, ""].end == 101


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        ((0.0,), 1),
        ([0.0], 1, 0),
        ((0.0,), -1, 0),
        ((float("nan"),), 0, 0),
        (("x",), 0, 0),
    ],
)
def test_what_is_no_place_is_refused(wrong: Any) -> None:
    with pytest.raises(ParameterError, match="place"):
        ask("a", continuation=Continuation(place=wrong))


@pytest.mark.parametrize("request_is_known", [True, False])
@pytest.mark.parametrize("sample", [-1, 1, 2])
@pytest.mark.parametrize(
    "event", [Cancel("a"), Finish("a", 0, 3), Pause("a", 0), Pause("a", 0, paused=False)]
)
def test_an_event_of_one_never_reaches_the_other_at_a_place_next_to_it(
    event: Any, sample: int, request_is_known: bool
) -> None:
    """Two beams wait where samples 1 and 2 of `a` would."""
    bench = Bench(ONE)
    bench.give(
        Submit(ask("first")), Submit(ask("other")), Submit(ask("a", needs_host_mask=True))
    )
    near = [placed(bench, "a", f"beam {at}", at, needs_host_mask=True) for at in (1, 2)]
    bench.give(*map(Submit, near))
    if not isinstance(event, Cancel):
        event = evolve(event, id="a" if request_is_known else "b", sample=sample)
    elif not request_is_known:
        event = Cancel("b")
    before = {seq.id for seq in bench.state.waiting}
    turn = bench.give(event)
    own = {("a", 0)} if event == Cancel("a") else set()
    assert {seq.id for seq in bench.state.waiting} == before - own
    assert not bench.state.paused
    assert own or [type(one) for one in turn.reasons] == [Ignored]


@pytest.mark.parametrize("event", [Finish("a", 1, 3), Pause("a", 1)])
def test_an_event_of_a_sample_that_has_ended_does_not_reach_who_has_its_place(
    event: Any,
) -> None:
    bench = Bench(ONE)
    bench.give(Submit(ask("first")), Submit(ask("a", n=2, needs_host_mask=True)))
    bench.give(Finish("a", 1, 0))
    assert {seq.id for seq in bench.state.waiting} == {("a", 0)}
    bench.give(Submit(placed(bench, "a", "beam", 1, needs_host_mask=True)))
    turn = bench.give(event)
    assert {seq.id for seq in bench.state.waiting} == {("a", 0), ("beam", 0)}
    assert not bench.state.paused
    assert [type(reason) for reason in turn.reasons] == [Ignored]
