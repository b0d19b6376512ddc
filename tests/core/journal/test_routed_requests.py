"""Where requests went, and what became of them there, as a router's journal says."""

from attrs import evolve

from minfer.journal.routed_requests import ENDED, LOST, MOVED, RoutedRequests
from minfer.journal.routing_journal import RoutingTurn
from minfer.routing.messages import (
    Dispatched,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.policies import Prefix, RoundRobin
from minfer.routing.policy import RoutingPolicy
from minfer.routing.router import apply, initial_router, route
from minfer.routing.state import RouterConfig
from tests.core.routing.routers import SIZE, ask


def folded(
    policy: RoutingPolicy, *story: RouterEvent | RoutingRequest
) -> list[tuple[str, str, bool, str]]:
    """A story's requests: id, replica, whether it started there, and its end there."""
    config = RouterConfig(policy, SIZE)
    state, requests = initial_router(config), RoutedRequests()
    for number, taken in enumerate(story):
        if isinstance(taken, RoutingRequest):
            routed = route(config, state, taken)
            state = routed.state
            requests.turn(RoutingTurn(number, taken, routed))
        else:
            applied = apply(config, state, (taken,))
            state = applied.state
            requests.turn(RoutingTurn(number, (taken,), applied))
    for one in requests.all:
        assert one.placed is None or one.placed.replica == one.replica
    return [(one.id, one.replica, one.started, one.end) for one in requests.all]


def test_a_request_is_followed_to_its_end_at_each_replica() -> None:
    joined = (ReplicaJoined("0"), ReplicaJoined("1"))
    assert folded(
        RoundRobin(),
        ask("early"),  # there is no replica
        *joined,
        *(ask(name) for name in "abcd"),
        RequestStarted("a"),
        RequestStarted("b"),
        ReplicaLeft("0"),  # with a and c
        ask("a"),
        Dispatched("1", ask("b")),
        RequestEnded("b"),
        RequestEnded("b"),
        RequestEnded("none"),
        ask("d"),
    ) == [
        ("a", "0", True, LOST),
        ("b", "1", True, MOVED),
        ("c", "0", False, LOST),
        ("d", "1", False, MOVED),
        ("a", "1", False, ""),
        ("b", "1", False, ENDED),
        ("d", "1", False, ""),
    ]
    sent = Dispatched("9", ask("a"))  # to a replica that takes nothing new
    assert folded(RoundRobin(), *joined, sent) == [("a", "9", False, "")]


def test_times_that_a_request_was_deferred_are_counted() -> None:
    config = RouterConfig(Prefix(least=0), SIZE)
    state, requests = initial_router(config), RoutedRequests()
    first, again = ask("y", rest=1, tenant="y"), ask("x", rest=500, tenant="x")
    state = apply(config, state, (ReplicaJoined("0"),)).state
    for number, request in enumerate((first, evolve(again, id="0"), again, again)):
        routed = route(config, state, request)
        state = routed.state
        requests.turn(RoutingTurn(number, request, routed))
    state = apply(config, state, (RequestEnded("0"),)).state
    requests.turn(RoutingTurn(4, again, route(config, state, again)))
    assert [(one.id, one.deferred) for one in requests.all] == [
        ("y", 0),
        ("0", 0),
        ("x", 2),
    ]
