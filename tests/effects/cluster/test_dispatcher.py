"""Requests wait in one queue for each tenant, are woken by what happens, and are assigned
once.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from minfer.effects.cluster.dispatch.dispatcher import (
    Assignment,
    Dispatcher,
    RecordedRouter,
)
from minfer.effects.cluster.dispatch.tenant_queue import Waiting
from minfer.routing.messages import (
    Deferred,
    ReplicaJoined,
    RequestEnded,
    RequestStarted,
    RoutingRequest,
)
from minfer.routing.policies import Prefix
from minfer.routing.router import route
from minfer.routing.state import RouterConfig

SHARE = RouterConfig(Prefix(least=0, patience=0.0), 64)
Assigned = Sequence[Assignment[str]]


def waiting(name: str, tenant: str = "x", user: str = "") -> Waiting[str]:
    return Waiting(name, RoutingRequest(name, (), 1000, tenant), user)


class Owner:
    """What is delivered to the owner of the requests, in batches."""

    def __init__(self, *names: str, refuses: bool = False) -> None:
        self.batches: list[list[str]] = []
        self.refused: list[str] = []
        router = RecordedRouter(SHARE, None)
        refuse: Callable[[str], None] | None = self.refused.append if refuses else None
        self.dispatcher = Dispatcher[str](router, self.take, refuse)
        for name in names:
            self.dispatcher.join(name)

    def take(self, assigned: Assigned) -> None:
        self.batches.append(
            [f"{assignment.item} {assignment.placed.replica}" for assignment in assigned]
        )


def test_what_is_submitted_together_is_delivered_together() -> None:
    owner = Owner("a", "b")
    owner.dispatcher.submit([waiting("1"), waiting("2", "y")])
    assert owner.batches == [["1 a", "2 b"]]
    owner.dispatcher.submit([])
    assert len(owner.batches) == 1


def test_a_deferred_request_is_woken_by_one_of_its_tenant_and_no_other() -> None:
    owner = Owner("a")
    owner.dispatcher.submit([waiting("other", "y"), waiting("first")])
    owner.dispatcher.submit([waiting("late"), waiting("last")])
    assert owner.dispatcher.waiting == 2
    assert owner.dispatcher.has("late")
    owner.dispatcher.settle(RequestStarted("nobody"), RequestEnded("late"))
    assert owner.dispatcher.waiting == 2
    owner.dispatcher.settle(RequestStarted("first"))
    assert owner.batches == [["other a", "first a"], ["late a"]]
    owner.dispatcher.submit([waiting("behind")])
    assert len(owner.batches) == 2, "it goes behind those of its tenant"
    owner.dispatcher.remove("last")
    owner.dispatcher.settle(RequestEnded("late"))
    assert owner.batches[2:] == [["behind a"]]
    assert not owner.dispatcher.waiting


def test_without_a_replica_requests_wait_or_are_refused() -> None:
    for refuses in (False, True):
        owner = Owner(refuses=refuses)
        owner.dispatcher.submit([waiting("1"), waiting("2", "y"), waiting("3")])
        assert owner.refused == (["1", "2", "3"] if refuses else [])
        owner.dispatcher.drain("a")  # which does not make it take any
        owner.dispatcher.join("a")
        assert owner.batches == ([] if refuses else [["1 a", "3 a", "2 a"]])
        owner.dispatcher.leave("a")
        owner.dispatcher.leave("a")
        owner.dispatcher.submit([waiting("4")])
        assert owner.refused[3:] == (["4"] if refuses else [])
        assert owner.dispatcher.waiting == (not refuses)


def test_replicas_of_another_kind_serve_while_there_is_none() -> None:
    owner, spare = Owner(), RecordedRouter(SHARE, None)
    dispatcher = owner.dispatcher = Dispatcher[str](
        RecordedRouter(SHARE, None), owner.take, fallback_router=spare
    )
    dispatcher.submit([waiting("1")])
    assert not owner.batches
    spare.apply(ReplicaJoined("s"))
    dispatcher.wake()
    dispatcher.submit([waiting("2", "y"), waiting("3")])
    assert owner.batches == [["1 s"], ["2 s"]]
    dispatcher.settle(RequestStarted("1"))
    assert owner.batches[2:] == [["3 s"]], "it had waited for one of that kind"
    dispatcher.join("a")
    dispatcher.submit([waiting("4", "z")])
    assert owner.batches[3:] == [["4 a"]]


MOVES = ["submit", "start", "end", "join", "drain", "leave", "remove", "wake"]


@given(st.lists(st.sampled_from(MOVES), max_size=60), st.randoms(use_true_random=False))
def test_whatever_happens_each_request_is_assigned_once_or_waits(
    moves: list[str], rng: Random
) -> None:
    """And none waits that could be assigned: its tenant's turn would have come."""
    owner = Owner()
    dispatcher, live, removed = owner.dispatcher, list[str](), set[str]()
    users = defaultdict[str, list[str]](list)  # what each submitted, in order
    for number, move in enumerate(moves):
        name, replica = f"{number}", rng.choice("abc")
        match move:
            case "submit":
                tenant, user = rng.choice("xy"), rng.choice("pq")
                users[tenant + user].append(name)
                live.append(name)
                dispatcher.submit([waiting(name, tenant, user)])
            case "start" | "end" if live:
                request_id = rng.choice(live)
                dispatcher.settle(
                    RequestStarted(request_id)
                    if move == "start"
                    else RequestEnded(request_id)
                )
            case "remove" if live and dispatcher.has(request_id := rng.choice(live)):
                dispatcher.remove(request_id)
                removed.add(request_id)
            case "join":
                dispatcher.join(replica)
            case "drain":
                dispatcher.drain(replica)
            case "leave":
                dispatcher.leave(replica)
            case "wake":
                dispatcher.wake()
        placed = [entry.split()[0] for batch in owner.batches for entry in batch]
        assert len(placed) == len({*placed})
        waiting_names = {name for name in live if dispatcher.has(name)}
        assert {*placed} | waiting_names | removed == {*live}
        assert not waiting_names & ({*placed} | removed)
        assert dispatcher.waiting == len(waiting_names)
        for names in users.values():
            placed_names = [name for name in names if name in placed]
            assert placed_names == sorted(placed_names, key=placed.index), (
                "users are served in order"
            )
        for queue in dispatcher._queues.values():
            if move != "remove":  # those behind it are woken by what happens next
                decision = route(SHARE, dispatcher.router.state, queue.first().request)
                free = dispatcher.router.state.replicas.values()
                none_takes = all(replica.draining for replica in free)
                assert none_takes or isinstance(decision.reason, Deferred)
