"""What the fair policy answers, one question at a time, in numbers; what it guarantees
is in test_policies.
"""

import math
from typing import Any

import pytest
from attrs import evolve

from minfer.policies.builtin import Fair
from minfer.policies.fair_queue import Account, Accounts, FairQueue
from minfer.policies.fair_seats import FairSeats
from minfer.records.policy import Load
from minfer.records.request import Request
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map

LOAD = Load(time=10.0, waiting=1, running=0, available=9, arrived=5.0, budget=8)


def ask(prompt: int = 4, max_tokens: int = 10, **more: Any) -> Request:
    return Request(id="r", prompt=(1,) * prompt, max_tokens=max_tokens, **more)


def test_a_client_starts_where_its_last_request_ends_but_not_in_the_past() -> None:
    policy = FairQueue(Map({"big": 4.0}))
    state = policy.start()
    assert state == Accounts(limit=1024)
    rank, state = policy.rank(state, ask(4, 10, n=3, client="a"), 7.0)
    assert rank == (0.0, 0.0)
    assert state.by_owner[0, "a"] == Account(end=34.0, start=0.0, live=3)
    rank, state = policy.rank(state, ask(4, 10, client="a"), 7.0)
    assert rank == (0.0, 34.0)
    assert state.by_owner[0, "a"] == Account(end=48.0, start=34.0, live=4)
    rank, state = policy.rank(state, ask(4, 12, client="big"), 7.0)
    assert (rank, state.by_owner[0, "big"].end) == ((0.0, 0.0), 4.0)
    state = policy.admitted(state, (0.0, 100.0), ask(), LOAD)
    assert state.times[0] == 100.0
    assert policy.admitted(state, (0.0, 50.0), ask(), LOAD).times[0] == 100.0
    rank, state = policy.rank(state, ask(4, 10, client="a"), 7.0)
    assert (rank, state.by_owner[0, "a"].end) == ((0.0, 100.0), 114.0)


def test_classes_have_times_and_accounts_of_their_own() -> None:
    policy = FairQueue()
    state = Accounts(Map({5: 70.0}), Map({(5, "a"): Account(90.0, 80.0, 1)}))
    rank, after = policy.rank(state, ask(client="a", priority=-2), 0.0)
    assert rank == (-2.0, 0.0)
    assert after.by_owner[5, "a"] == state.by_owner[5, "a"]
    rank, _ = policy.rank(state, ask(client="b", priority=5), 0.0)
    assert rank == (5.0, 70.0)
    assert policy.admitted(state, (-2.0, 3.0), ask(priority=-2), LOAD).times == Map(
        {5: 70.0, -2: 3.0}
    )
    assert policy.may_preempt(state, (-2.0, 9.0), (5.0, 1.0))
    assert not policy.may_preempt(state, (5.0, 0.0), (5.0, 9.0)), "within a class"


@pytest.mark.parametrize("kind", [FairQueue, FairSeats])
@pytest.mark.parametrize("waiting", range(-2, 3))
@pytest.mark.parametrize("running", range(-2, 3))
def test_a_class_displaces_only_those_that_are_less_urgent(
    running: int, waiting: int, kind: type[FairQueue]
) -> None:
    """However far ahead or behind the accounts are."""
    for start, other in ((0.0, 0.0), (0.0, 9.0), (9.0, 0.0)):
        displaces = kind().may_preempt(None, (waiting, start), (running, other))
        assert displaces == (waiting < running)


def test_what_was_not_used_is_given_back_at_the_clients_weight() -> None:
    policy = FairQueue(Map({"big": 4.0}))
    state = Accounts(
        by_owner=Map({(0, "a"): Account(100.0, 60.0, 2), (0, "big"): Account(100.0)})
    )

    def left(request: Request, output: int, *, ran: bool) -> Account:
        return policy.ended(state, request, output, ran).by_owner[0, request.client]

    assert left(ask(8, 10, client="a"), 4, ran=True) == Account(94.0, 60.0, 1)
    assert left(ask(8, 10, client="a", n=2), 0, ran=False).end == 86.0
    assert left(ask(8, 10, client="big"), 2, ran=True) == Account(98.0)
    assert left(ask(8, 10, client="a"), 10, ran=True) == Account(100.0, 60.0, 1)
    assert policy.ended(state, ask(client="unknown"), 1, True) is state
    assert policy.ended(state, ask(client="a", priority=1), 1, True) is state


def test_what_is_given_back_is_not_forfeited_to_the_order_of_a_clients_own() -> None:
    """Nothing starts before what it asked for earlier, as long as that is here; but the
    account is charged as if it had.
    """
    policy = FairQueue()
    state = Accounts(by_owner=Map({(0, "a"): Account(20.0, 1000.0, 1)}))
    rank, after = policy.rank(state, ask(4, 6, client="a"), 0.0)
    assert rank == (0.0, 1000.0)
    assert after.by_owner[0, "a"] == Account(30.0, 1000.0, 2)
    solo = Accounts(by_owner=Map({(0, "a"): Account(20.0, 1000.0, 0)}))
    assert policy.rank(solo, ask(client="a"), 0.0)[0] == (0.0, 20.0)


def test_accounts_that_matter_least_are_forgotten_when_there_are_many() -> None:
    policy = FairQueue(clients=2)
    state = Accounts(
        Map({0: 10.0, 1: 2.0}),
        Map(
            {
                (0, "even"): Account(10.0),
                (0, "ahead"): Account(11.0),
                (0, "further"): Account(12.0),
                (0, "here"): Account(9.0, 9.0, 1),
                (1, "far"): Account(99.0),
            }
        ),
        5,
    )
    _, same = policy.rank(state, ask(client="even"), 0.0)
    assert set(same.by_owner) == set(state.by_owner), "who is known makes no room"
    _, fewer = policy.rank(state, ask(client="new"), 0.0)
    assert set(fewer.by_owner) == {(0, "further"), (0, "here"), (0, "new")}
    assert fewer.times == Map({0: 10.0}), "an empty class begins anew"
    assert fewer.limit == 4
    _, room = policy.rank(evolve(state, limit=6), ask(client="new"), 0.0)
    assert len(room.by_owner) == 6


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5])
def test_of_those_who_are_ahead_no_more_are_kept_than_half(least: int) -> None:
    ends = {(0, f"c{i}"): Account(float(end)) for i, end in enumerate((1, 2, 2, 2, 3))}
    state = Accounts(by_owner=Map({**ends, (0, "here"): Account(live=1)}))
    kept = state.with_room(least).by_owner
    assert len(kept) - 1 == {1: 0, 2: 1, 3: 1, 4: 1, 5: 1}[least], "equals go together"
    assert (0, "here") in kept
    assert least == 1 or (0, "c4") in kept


def test_accounts_of_live_samples_take_no_place_of_those_that_are_ahead() -> None:
    live = {(0, f"live{i}"): Account(50.0, live=1) for i in range(3)}
    ahead = {(0, "far"): Account(9.0), (0, "near"): Account(7.0), (0, "last"): Account(6)}
    state = Accounts(by_owner=Map(live | ahead))
    kept = state.with_room(4).by_owner
    assert set(kept) == {*live, (0, "far"), (0, "near")}


@pytest.mark.long
@pytest.mark.parametrize("classes", [False, True])
def test_who_comes_once_with_a_name_or_class_of_its_own_fills_no_memory(
    classes: bool,
) -> None:
    policy = FairQueue()
    state = policy.start()
    _, state = policy.rank(state, ask(client="stays"), 0.0)
    for i in range(5000):
        request = ask(priority=i) if classes else ask(client=f"c{i}")
        rank, state = policy.rank(state, request, 0.0)
        state = policy.admitted(state, rank, request, LOAD)
        state = policy.ended(state, request, 0, True)
    assert len(state.by_owner) <= 1024
    assert len(state.times) <= 1024


@pytest.mark.parametrize(
    "weight",
    [
        *(0, 0.0, -1, math.nan, math.inf, 2**63, True, "1", None),
        pytest.param(10**5000, id="too long to write out"),
    ],
)
@pytest.mark.parametrize("kind", [Fair, FairQueue])
def test_weights_are_numbers_above_nothing(
    kind: type[Fair | FairQueue], weight: Any
) -> None:
    with pytest.raises(ConfigError, match="weights"):
        kind(Map({"a": weight}))
    assert kind(Map({"a": 1e-9, "b": 2**63 - 1})).weights["a"] == 1e-9
