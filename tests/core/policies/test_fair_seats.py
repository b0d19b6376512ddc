"""What the policy of seats answers, one question at a time; what a crowd feels of it is
in test_crowd.
"""

from typing import Any

import pytest
from attrs import evolve

from minfer.planning.admission import _next_admissible
from minfer.planning.schedule import queue_blocked_by
from minfer.planning.step_builder import StepBuilder
from minfer.policies.builtin import policy_named
from minfer.policies.fair_queue import FairQueue
from minfer.policies.fair_seats import (
    JOIN_EVERY_STEPS,
    LINGER_SECONDS,
    STALE_SECONDS,
    Beside,
    FairSeats,
    Seats,
)
from minfer.records.messages import Admitted, Cancel, Pause, QueueBlocked, Submit
from minfer.records.policy import Load
from minfer.records.request import Request
from minfer.records.state import initial
from minfer.values.checks import ConfigError
from minfer.values.pmap import Map
from tests.core.lifecycle.test_pausing import Judged
from tests.core.test_engine import CONFIG, Bench, ask

LOAD = Load(10.0, 1, running=20, available=9, arrived=5.0, budget=8, seats=64, step=8)


def wants(client: str, **more: Any) -> Request:
    return Request(id="r", prompt=(1,), max_tokens=4, client=client, **more)


def seated(**seats: int) -> Seats:
    """A state in which clients have so many seats, of class 0."""
    state = FairSeats().start()
    for client, count in seats.items():
        state = state.with_samples(wants(client), count) if count else state
    return state


def held(state: Seats, request: Request, came: int = 0, **more: Any) -> bool:
    policy = more.pop("policy", FairSeats())
    answer, _ = policy.defer(state, request, evolve(LOAD, **more), came)
    assert isinstance(answer, bool)
    return answer


@pytest.mark.parametrize(
    ("mine", "others", "is_held"),
    [
        (7, 1, False),  # each client may have eight
        (8, 1, True),
        (8, 4, True),
        (9, 5, False),  # or twice as many as others
        (10, 5, True),
        (100, 0, False),
        (0, 100, False),
    ],
)
def test_a_client_has_twice_the_seats_of_others_or_the_least(
    mine: int, others: int, is_held: bool
) -> None:
    state = seated(a=mine, b=others)
    assert held(state, wants("a")) == is_held
    assert not held(state, wants("new")), "each client may have a first seat"


def test_an_eighth_of_many_seats_is_anybodys() -> None:
    state = seated(a=31, b=1)
    assert held(state, wants("a"))
    assert not held(state, wants("a"), seats=256)
    assert held(seated(a=32, b=1), wants("a"), seats=256)
    assert not held(seated(a=9, b=1), wants("a"), policy=FairSeats(least=10))


def test_who_is_due_more_has_more_seats_beside_others() -> None:
    policy = FairSeats(Map({"a": 3.0}))
    assert not held(seated(a=29, b=5), wants("a"), policy=policy)
    assert held(seated(a=30, b=5), wants("a"), policy=policy)


def test_a_client_with_seats_joins_at_some_steps_only_and_few_at_once() -> None:
    state = seated(a=1, b=5)
    steps = [not held(state, wants("a"), step=step) for step in range(9)]
    assert steps == [step % JOIN_EVERY_STEPS == 0 for step in range(9)]
    assert not held(state, wants("a"), came=3)
    assert held(state, wants("a"), came=4)
    assert not held(state, wants("a"), came=4, running=80), "one of 16 may be new"
    assert held(state, wants("a"), came=5, running=80)
    assert held(state, wants("a"), came=2, policy=FairSeats(newcomers=2))
    assert not held(seated(a=1), wants("a"), came=99, step=1), "no other is there"


def test_while_all_who_run_are_paused_it_joins_at_any_step_few_at_once() -> None:
    state = seated(a=1, b=5)
    for step in range(JOIN_EVERY_STEPS):
        assert not held(state, wants("a"), step=step, paused=True)
        assert held(state, wants("a"), step=step, paused=True, came=4)
    assert held(seated(a=8, b=1), wants("a"), paused=True), "it has its share"


def test_the_less_urgent_bound_no_client_and_all_its_classes_count() -> None:
    state = seated(b=5).with_samples(wants("a", priority=1), 20)
    assert held(state, wants("a"))
    assert held(state, wants("a", priority=1))
    assert not held(
        state.with_samples(wants("a", priority=-1), 1), wants("a", priority=-1)
    )
    assert held(state.with_samples(wants("u", priority=-2), 1), wants("a", priority=-1))


def test_who_has_just_ended_counts_for_a_while() -> None:
    policy, state = FairSeats(), seated(a=9, b=4)
    _, state = policy.defer(state, wants("a"), LOAD, 0)
    assert state.beside["a"] == Beside(4, LOAD.time)
    solo = state.with_samples(wants("b"), -4)
    late = LOAD.time + LINGER_SECONDS
    assert held(solo, wants("a"), time=late - 0.01)
    assert not held(solo, wants("a"), time=late)
    _, soon = policy.defer(
        state, wants("a"), evolve(LOAD, time=10.0 + STALE_SECONDS / 2), 0
    )
    assert soon is state, "nothing is noted at each step"
    _, later = policy.defer(state, wants("a"), evolve(LOAD, time=10.0 + STALE_SECONDS), 0)
    assert later.beside["a"] == Beside(4, 10.0 + STALE_SECONDS)
    more = state.with_samples(wants("c"), 1)
    _, more = policy.defer(more, wants("a"), evolve(LOAD, time=10.0), 0)
    assert more.beside["a"] == Beside(5, 10.0)
    assert state.with_samples(wants("a"), -9).beside == Map(), "who is gone is forgotten"


def test_seats_are_counted_from_the_first_admission_to_the_end() -> None:
    policy: Any = FairSeats()
    state: Any = policy.start()
    one, other = wants("a", n=2), wants("a", priority=3)
    rank, state = policy.rank(state, one, 0.0)
    state = policy.admitted(state, rank, one, LOAD)
    state = policy.admitted(state, rank, one, LOAD)
    rank, state = policy.rank(state, other, 0.0)
    state = policy.admitted(state, rank, other, LOAD)
    assert (
        state.num_seats("a"),
        state.num_other_seats("b", 0),
        state.num_other_seats("b", 3),
    ) == (3, 2, 3)
    assert state.num_other_seats("a", 3) == 0
    assert policy.ended(state, one, 0, False).num_seats("a") == 3, "it never ran"
    for request in (one, one, other):
        state = policy.ended(state, request, 2, True)
    assert (state.held, state.taken) == (Map(), Map())
    assert state.by_owner, "the accounts of tokens are kept"


def test_accounts_that_are_forgotten_leave_the_seats() -> None:
    policy: Any = FairSeats(clients=1)
    _, state = policy.rank(seated(a=2), wants("b"), 0.0)
    _, state = policy.rank(evolve(state, limit=0), wants("c"), 0.0)
    assert isinstance(state, Seats)
    assert state.num_seats("a") == 2


@pytest.mark.parametrize("name", ["least", "newcomers"])
def test_no_client_can_be_kept_from_a_first_seat(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        policy_named(f"fair:{name}=0")


SMALL = evolve(CONFIG, num_blocks=200, max_num_seqs=16, depth=1)


def asks(client: str, count: int, tokens: int = 40) -> list[Submit]:
    return [
        Submit(evolve(ask(f"{client}{i}", 3, tokens), client=client))
        for i in range(count)
    ]


def seats(bench: Bench, client: str) -> int:
    return sum(seq.request.client == client for seq in bench.state.running.seqs)


def test_others_pass_a_client_that_has_its_share_which_is_reported() -> None:
    bench = Bench(evolve(SMALL, policy=FairSeats(least=2, newcomers=16)))
    bench.give(*asks("b", 2))
    bench.turn(*asks("a", 9))
    for _ in range(4 * JOIN_EVERY_STEPS):
        bench.turn()
    assert (seats(bench, "a"), seats(bench, "b")) == (4, 2)
    assert queue_blocked_by(bench.config, bench.state) == "share"
    assert bench.reasons_of(QueueBlocked)[-1].cause == "share"
    assert bench.state.deferred_clients == {"a"}
    first = bench.state.waiting.first()
    bench.turn(*asks("c", 1))
    assert seats(bench, "c") == 1, "it came after those who wait, and passed them"
    assert bench.state.waiting.first() is first
    for _ in range(2 * JOIN_EVERY_STEPS):
        bench.turn()
    assert seats(bench, "a") == 6, "with more beside it, it has more"
    bench.drain()
    assert len(bench.ended) == 12


def test_where_no_sample_runs_any_more_none_is_deferred() -> None:
    """As once the last running one was preempted for a waiting one."""
    bench = Bench(evolve(SMALL, max_num_seqs=1, policy=FairSeats(least=2)))
    bench.give(*asks("a", 2))
    assert len(bench.state.running) == 1
    state = evolve(bench.state, running=initial(bench.config).running)
    deferred = {"a"}
    work = StepBuilder(bench.config, state)
    assert _next_admissible(work, deferred) is state.waiting.first()
    assert not deferred


@pytest.mark.long
def test_a_single_client_has_every_seat_at_once_and_again_once_others_have_ended() -> (
    None
):
    bench = Bench(evolve(SMALL, policy=FairSeats(least=2)))
    bench.give(*asks("a", 20))
    bench.turn()
    assert seats(bench, "a") > FairSeats().newcomers
    bench = Bench(evolve(SMALL, policy=FairSeats(least=2)))
    bench.give(*asks("b", 1, tokens=4))
    bench.turn(*asks("a", 20))
    while seats(bench, "b"):
        assert seats(bench, "a") <= 2
        bench.turn()
    bench.turn()
    bench.turn()
    assert seats(bench, "a") > 8
    bench.drain()
    assert len(bench.ended) == 21


def test_as_fair_queue_decides_while_there_is_one_client() -> None:
    reported = []
    for policy in (FairQueue(), FairSeats(least=1, newcomers=1)):
        bench = Bench(evolve(SMALL, policy=policy))
        bench.give(*asks("a", 30, tokens=9))
        bench.drain()
        reported.append([(one.id, one.waited) for one in bench.reasons_of(Admitted)])
    assert reported[0] == reported[1]


@pytest.mark.long
@pytest.mark.parametrize("steps", range(JOIN_EVERY_STEPS))
def test_newcomers_do_not_stand_while_all_who_run_are_paused(steps: int) -> None:
    """No step passes then, so none is the fourth."""
    config = evolve(SMALL, late_masks=True, policy=FairSeats(least=6, newcomers=2))
    bench = Judged(config)
    bound = [
        Submit(evolve(ask(name, 3, 90), client=name, needs_host_mask=True))
        for name in "ab"
    ]
    bench.turn(*bound)
    for _ in range(steps + 2):
        bench.turn()
    bench.turn(Pause("a", 0), Pause("b", 0))
    for _ in range(3):
        bench.turn()
    stood = bench.state.next_step
    assert not bench.state.inflight
    bench.turn(*asks("a", 9))
    joins = 3 if stood % JOIN_EVERY_STEPS == 0 else 2
    assert seats(bench, "a") == joins, "one at least, and then steps pass again"
    assert bench.state.next_step > stood
    for _ in range(2 * JOIN_EVERY_STEPS):
        bench.turn()
    assert seats(bench, "a") == 6, "its share, and then no more"
    bench.turn(Pause("a", 0, paused=False), Pause("b", 0, paused=False))
    bench.drain()


def test_newcomers_that_are_paused_themselves_do_not_stand_either() -> None:
    """A paused sample makes no step pass."""
    config = evolve(SMALL, late_masks=True, policy=FairSeats(least=3, newcomers=1))
    bench = Judged(config)
    names = ["b0", "a0", "a1", "a2"]
    bench.turn(*asks("c", 1, tokens=2))
    bench.drain()
    stood = bench.state.next_step
    assert stood % JOIN_EVERY_STEPS
    for name in names:
        request = evolve(ask(name, 1, 9), client=name[0], needs_host_mask=True)
        bench.give(Submit(request), Pause(name, 0))
    assert [name for name, _ in bench.state.running.ids] == names
    assert bench.state.next_step == stood
    bench.turn(*(Pause(name, 0, paused=False) for name in names))
    bench.drain()


def test_who_left_before_it_was_let_in_never_is() -> None:
    bench = Bench(evolve(SMALL, policy=FairSeats(least=2)))
    bench.give(*asks("b", 1))
    bench.turn(*asks("a", 9))
    waiting = [seq.request.id for seq in bench.state.waiting]
    bench.turn(*map(Cancel, waiting), *asks("d", 3), *(Cancel(f"d{i}") for i in range(3)))
    bench.drain()
    ran = {one.id for one in bench.reasons_of(Admitted)}
    assert len(waiting) > 5
    assert ran.isdisjoint({*waiting, "d0", "d1", "d2"})


def test_a_preempted_one_comes_back_whatever_its_client_has() -> None:
    """Blocks run out: who gave way takes up the seat it had, though its client has its
    share and more.
    """
    config = evolve(SMALL, num_blocks=24, policy=FairSeats(least=2, newcomers=16))
    bench = Bench(config)
    bench.give(*asks("a", 6, tokens=20))
    bench.turn(*asks("b", 2, tokens=20))
    bench.drain()
    assert len(bench.ended) == 8
    assert all(one.reason == "length" for one in bench.ended.values())
