"""Each policy's answers, one question at a time, in numbers."""

import math
from typing import Any

import pytest
from attrs import evolve

from minfer.policies.builtin import (
    PROMPT_TOKENS_PER_OUTPUT,
    Ageing,
    Deadline,
    Fair,
    Gathering,
    Priority,
    Shares,
    Shortest,
    Static,
    Window,
    policy_named,
)
from minfer.policies.fair_seats import FairSeats
from minfer.records.policy import FirstCome, Load
from minfer.records.request import Continuation
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map
from tests.core.policies.test_fair_queue import ask


def load(**more: Any) -> Load:
    right = {
        "time": 10.0,
        "waiting": 1,
        "running": 0,
        "available": 9,
        "arrived": 5.0,
        "budget": 8,
    }
    return Load(**{**right, **more})


def test_first_come_answers_nothing_special() -> None:
    policy = FirstCome()
    assert policy.start() is None
    assert policy.rank("s", ask(priority=3), 5.0) == ((), "s")
    assert policy.requeue_rank("s", (1.0,), ask(), 5.0, 3) == (1.0,)
    assert policy.admit_from("s", load()) == 10.0
    assert policy.admitted("s", (1.0,), ask(), load()) == "s"
    assert policy.ended("s", ask(), 3, True) == "s"
    assert policy.victim("s", ((), (), ())) == 2
    assert not policy.may_preempt("s", (1.0,), (2.0,))
    assert policy.budget("s", load()) == 8
    assert policy.defer("s", ask(), load(), 0) == (False, "s")


def test_priority_ranks_by_level_and_displaces_only_the_less_urgent() -> None:
    policy = Priority()
    assert policy.rank(None, ask(priority=-2), 5.0) == ((-2.0,), None)
    assert policy.may_preempt(None, (1.0,), (2.0,))
    assert not policy.may_preempt(None, (2.0,), (2.0,))
    assert not policy.may_preempt(None, (3.0,), (2.0,))


@pytest.mark.parametrize(
    ("priority", "rank"),
    [(0, 7.0), (1, 12.0), (3, 22.0), (9, 22.0), (-1, 2.0), (-3, -8.0), (-9, -8.0)],
)
def test_ageing_ranks_by_time_and_level_within_its_levels(
    priority: int, rank: float
) -> None:
    assert Ageing(5.0, 3).rank("s", ask(priority=priority), 7.0) == ((rank,), "s")


def test_ageing_displaces_who_is_behind_by_a_whole_level() -> None:
    policy = Ageing(5.0)
    assert policy.may_preempt(None, (1.0,), (6.0,))
    assert policy.may_preempt(None, (1.0,), (7.0,))
    assert not policy.may_preempt(None, (1.0,), (5.9,))


def test_deadlines_are_from_the_arrival_on_and_slack_stands_for_none() -> None:
    policy = Deadline(60.0)
    assert policy.rank("s", ask(deadline=3.0), 7.0) == ((10.0,), "s")
    assert policy.rank("s", ask(deadline=300.0), 7.0) == ((307.0,), "s")
    assert policy.rank("s", ask(), 7.0) == ((67.0,), "s")


def test_shortest_ranks_by_the_work_that_is_left() -> None:
    policy = Shortest(0.5)
    request = ask(2 * PROMPT_TOKENS_PER_OUTPUT, 10)
    assert policy.rank("s", request, 7.0) == ((7.0 + 0.5 * 12,), "s")
    assert policy.requeue_rank("s", (99.0,), request, 7.0, 4) == (7.0 + 0.5 * 8,)


def test_fair_starts_a_client_where_its_last_request_ends_but_not_in_the_past() -> None:
    policy = Fair(Map({"big": 4.0}))
    state: Any = policy.start()
    assert state == Shares(limit=1024)
    rank, state = policy.rank(state, ask(4, 10, n=3, client="a"), 7.0)
    assert (rank, state.tags["a"]) == ((0.0,), 34.0)
    rank, state = policy.rank(state, ask(4, 10, client="a"), 7.0)
    assert (rank, state.tags["a"]) == ((34.0,), 48.0)
    rank, state = policy.rank(state, ask(4, 12, client="big"), 7.0)
    assert (rank, state.tags["big"]) == ((0.0,), 4.0)
    state = policy.admitted(state, (100.0,), ask(), load())
    assert state.now == 100.0
    assert policy.admitted(state, (50.0,), ask(), load()).now == 100.0
    rank, state = policy.rank(state, ask(4, 10, client="a"), 7.0)
    assert (rank, state.tags["a"]) == ((100.0,), 114.0)


def test_fair_gives_back_what_was_not_used_at_the_clients_weight() -> None:
    policy = Fair(Map({"big": 4.0}))
    state = Shares(tags=Map({"a": 100.0, "big": 100.0}))
    assert policy.ended(state, ask(8, 10, client="a"), 4, True).tags["a"] == 94.0
    assert policy.ended(state, ask(8, 10, client="a", n=2), 0, False).tags["a"] == 86.0
    assert policy.ended(state, ask(8, 10, client="big"), 2, True).tags["big"] == 98.0
    assert policy.ended(state, ask(8, 10, client="a"), 10, True) is state
    assert policy.ended(state, ask(8, 10, client="unknown"), 1, True) is state


def test_fair_forgets_clients_that_are_owed_nothing_when_there_are_many() -> None:
    policy = Fair(clients=3)
    state = Shares(10.0, Map({"old": 9.0, "even": 10.0, "ahead": 11.0}), 3)
    _, same = policy.rank(state, ask(client="even"), 0.0)
    assert set(same.tags) == {"old", "even", "ahead"}, "who is known makes no room"
    _, fewer = policy.rank(state, ask(client="new"), 0.0)
    assert set(fewer.tags) == {"ahead", "new"}
    assert fewer.limit == 3
    _, more = policy.rank(evolve(state, now=0.0), ask(client="new"), 0.0)
    assert set(more.tags) == {"old", "even", "ahead", "new"}
    assert more.limit == 6
    _, room = policy.rank(evolve(state, limit=4), ask(client="new"), 0.0)
    assert set(room.tags) == {"old", "even", "ahead", "new"}


def test_the_window_opens_for_its_wait_and_is_shortened_by_who_is_in_a_hurry() -> None:
    policy = Window(5.0, 2, wait=4.0, fill=3, urgent=-1, part=0.5)
    opened = policy.start()
    assert opened == Gathering(math.inf, 0, -math.inf, math.inf)
    rank, one = policy.rank(opened, ask(priority=1, n=2), 10.0)
    assert rank == (15.0,)
    assert one == Gathering(14.0, 2, 10.0, math.inf)
    assert policy.rank(one, ask(), 11.0)[1] == Gathering(14.0, 3, 11.0, 1.0)
    assert policy.rank(one, ask(deadline=3.0), 11.0)[1].due == 12.5
    assert policy.rank(one, ask(priority=-1), 11.0)[1].due == 11.0
    assert policy.rank(one, ask(priority=-2), 11.0)[1].due == 11.0
    assert policy.rank(opened, ask(deadline=0.0), 11.0)[1].due == 11.0


def test_the_window_smooths_the_gap_between_arrivals() -> None:
    policy = Window(wait=4.0)
    state = Gathering(14.0, 1, 10.0, 2.0)
    assert policy.rank(state, ask(), 11.0)[1].gap == 1.5
    assert policy.rank(state, ask(), 100.0)[1].gap == 5.0, (
        "beyond twice the wait it is slow"
    )
    assert policy.rank(state, ask(), 10.0)[1].gap == 1.0


@pytest.mark.parametrize(
    ("changes", "waiting", "start"),
    [
        ({}, 2, 14.0),
        ({}, 4, 10.0),  # a sample waits that is done
        ({"fresh": 9}, 8, 10.0),  # full
        ({"fresh": 9}, 9, 10.0),
        ({"fresh": 9}, 7, 14.0),
        ({"gap": 2 / 3}, 2, 14.0),  # six more at that pace are there in time
        ({"gap": 0.7}, 2, 10.0),
        ({"gap": math.inf}, 2, 10.0),
        ({"due": 9.0}, 2, 10.0),
    ],
)
def test_the_window_goes_when_it_is_full_or_pointless(
    changes: dict[str, Any], waiting: int, start: float
) -> None:
    state = evolve(Gathering(14.0, 3, 9.0, 0.5), **changes)
    assert Window(wait=5.0, fill=8).admit_from(state, load(waiting=waiting)) == start


def test_the_window_starts_anew_with_an_admission_and_forgets_who_gave_up() -> None:
    policy, state = Window(), Gathering(14.0, 3, 9.0, 0.5)
    assert policy.admitted(state, (), ask(), load()) == Gathering(math.inf, 0, 9.0, 0.5)
    assert policy.ended(state, ask(), 0, False) == Gathering(14.0, 2, 9.0, 0.5)
    assert policy.ended(state, ask(), 5, True) is state
    unchanged = evolve(state, fresh=0)
    assert policy.ended(unchanged, ask(), 0, False) is unchanged


def test_later_rounds_of_a_search_are_no_arrivals_to_the_window() -> None:
    policy, state = Window(5.0, 2), Gathering(14.0, 3, 9.0, 0.5)
    beam = ask(priority=1, continuation=Continuation(place=((2.0,), 4, 1)))
    assert policy.rank(state, beam, 10.0) == ((15.0,), state)
    assert policy.ended(state, beam, 0, False) is state


def test_static_batches_take_members_that_were_there_and_then_wait() -> None:
    policy = Static(2)
    assert policy.start() == (-math.inf, 0)
    assert policy.admitted((3.0, 2), (), ask(), load(running=0)) == (10.0, 1)
    assert policy.admitted((3.0, 1), (), ask(), load(running=1)) == (3.0, 2)
    assert policy.admit_from((10.0, 1), load(running=1, arrived=10.0)) == 10.0
    assert policy.admit_from((10.0, 1), load(running=1, arrived=10.5)) == math.inf
    assert policy.admit_from((10.0, 2), load(running=1, arrived=9.0)) == math.inf
    assert policy.admit_from((10.0, 2), load(running=0, arrived=11.0)) == 10.0


def test_names_take_options_of_numbers() -> None:
    assert policy_named("ageing") == Ageing()
    assert policy_named("window:fill=3,wait=0.5") == Window(fill=3, wait=0.5)
    assert policy_named("fair:clients=7,least=3") == FairSeats(clients=7, least=3)
    with pytest.raises(ConfigError, match="it has none"):
        policy_named("priority:levels=3")
    with pytest.raises(ConfigError, match="it has seconds, levels"):
        policy_named("ageing:x=3")
