"""Events and decisions, one at a time; the kit has stories of them."""

from typing import Any

import pytest
from attrs import frozen

from minfer.routing.key_index import SHARDS
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Deferred,
    Dispatched,
    Estimate,
    EventIgnored,
    Invalid,
    LoadReport,
    NoReplica,
    Placed,
    ReplicaChoice,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
)
from minfer.routing.policy import RoutingPolicy
from minfer.routing.router import initial_router, route
from minfer.routing.state import RouterConfig
from minfer.values.checks import ConfigError
from tests.core.routing.routers import Desk, ask, keys


@frozen
class Answers(RoutingPolicy):
    """A policy that answers whatever it is told to."""

    answer: Any

    def choose(self, *_: Any) -> Any:
        return self.answer


def test_the_policy_is_asked_about_hits_and_what_is_left_to_compute() -> None:
    class Asked(RoutingPolicy):
        def choose(self, *args: Any) -> Any:
            asked.extend((c.replica.name, c.hit, c.prefill) for c in args[2])
            return ReplicaChoice("b", "why", 0.5, (Estimate("c", 1, 2.0),)), "policy's"

    asked = list[Any]()
    desk = Desk("cab", Asked())
    desk.tell(BlocksPublished("a", keys(1, 2)), BlocksPublished("c", keys(1, 2, 3, 4)))
    found = desk.route(ask("r", 1, 2, 3))
    assert asked == [("a", 2, 15), ("b", 0, 35), ("c", 3, 5)]
    others = (Estimate("c", 1, 2.0),)
    assert found.reason == Placed("r", "b", "why", 0, 3, 35, 0.5, others)
    assert found.replica == "b"
    assert desk.state.policy == "policy's"
    assert (desk["b"].requests, desk["b"].backlog) == (1, 35)
    assert found.state is desk.state


def test_without_replicas_requests_are_refused_with_a_reason() -> None:
    desk = Desk("")
    assert desk.route(ask("r")).reason == NoReplica("r", 0)
    desk.tell(ReplicaJoined("a"), ReplicaJoined("b"), ReplicaDraining("a"))
    assert desk.placed(ask("s")) == "b"
    desk.tell(ReplicaDraining("b"))
    found = desk.route(ask("s"))
    assert (found.replica, found.reason) == (None, NoReplica("s", 2))
    assert desk.state.requests == Desk("").state.requests
    desk.tell(ReplicaJoined("b"))
    assert desk.placed(ask("s")) == "b"
    desk.tell(ReplicaLeft("b"))
    assert desk.placed(ask("s")) is None


def test_a_request_goes_to_replicas_that_can_serve_it_alone() -> None:
    desk = Desk("abc")
    for number in range(4):
        allowed = ("b", "gone")
        assert desk.placed(ask(f"r{number}", allowed=allowed)) == "b"
    assert desk.placed(ask("other")) in ("a", "c")
    for nowhere in ((), ("gone",)):
        found = desk.route(ask("none", allowed=nowhere))
        assert found.replica is None
        assert isinstance(found.reason, NoReplica)


def test_a_policy_that_chooses_a_replica_that_cannot_serve_is_overridden() -> None:
    desk = Desk("abc", Answers((ReplicaChoice("a", "mine"), None)))
    found = desk.route(ask(allowed=("b",)))
    assert found.replica == "b"
    assert "cannot serve" in getattr(found.reason, "override", "")


def test_a_draining_replica_keeps_its_requests_and_keys() -> None:
    desk = Desk("a")
    desk.tell(BlocksPublished("a", keys(1)), Dispatched("a", ask("r")))
    desk.tell(ReplicaDraining("a"))
    assert desk["a"].requests == 1
    desk.tell(BlocksPublished("a", keys(1, 2)), ReplicaJoined("a"))
    assert desk.reasons == []
    reason = desk.route(ask("s", 1, 2)).reason
    assert isinstance(reason, Placed)
    assert reason.hit == 2


def test_a_replica_that_comes_again_has_nothing_cached() -> None:
    desk = Desk("ab")
    desk.tell(BlocksPublished("a", keys(1, 2)), BlocksPublished("b", keys(1)))
    desk.tell(ReplicaLeft("a"))
    assert [*desk.state.names] == ["b"]
    desk.tell(ReplicaJoined("a"))
    assert [*desk.state.names] == ["a", "b"]
    reason = desk.route(ask("r", 1, 2)).reason
    assert isinstance(reason, Placed)
    assert (reason.replica, reason.hit) == ("a", 0)


def test_a_cleared_cache_is_empty_and_the_requests_stay() -> None:
    desk = Desk("a")
    desk.tell(BlocksPublished("a", keys(1, 2)), Dispatched("a", ask("q")))
    desk.tell(CacheCleared("a"), BlocksPublished("a", keys(1)))
    reason = desk.route(ask("r", 1, 2)).reason
    assert isinstance(reason, Placed)
    assert reason.hit == 1
    assert desk["a"].requests == 2


def test_evicted_blocks_are_no_hits() -> None:
    desk = Desk("a")
    desk.tell(BlocksPublished("a", keys(1, 2)), BlocksEvicted("a", keys(1, 2)[1:]))
    reason = desk.route(ask("r", 1, 2)).reason
    assert isinstance(reason, Placed)
    assert reason.hit == 1


def test_a_dispatch_elsewhere_counts_what_is_cached_there() -> None:
    desk = Desk("ab")
    desk.tell(BlocksPublished("a", keys(1, 2)), Dispatched("a", ask("r", 1, 2, 3)))
    desk.tell(Dispatched("b", ask("s", 1, 2, 3)))
    assert (desk["a"].backlog, desk["b"].backlog) == (15, 35)


def test_a_request_that_is_routed_again_counts_once() -> None:
    desk = Desk("a")
    desk.route(ask("r", 1))
    desk.route(ask("r", 1, 2))
    assert (desk["a"].requests, desk["a"].backlog) == (1, 25)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (ReplicaJoined("a"), "replica 'a' is there"),
        (ReplicaLeft("x"), "no replica 'x'"),
        (ReplicaDraining("x"), "no replica 'x'"),
        (CacheCleared("x"), "no replica 'x'"),
        (BlocksPublished("x", keys(1)), "no replica 'x'"),
        (BlocksEvicted("x", keys(1)), "no replica 'x'"),
        (LoadReport("x", 1, 1, 1), "no replica 'x'"),
        (Dispatched("x", ask("r")), "no replica 'x'"),
        (RequestStarted("r"), "request 'r' is on no replica"),
        (RequestEnded("r"), "request 'r' is on no replica"),
    ],
)
def test_events_without_a_meaning_are_ignored_with_a_reason(
    event: Any, what: str
) -> None:
    desk = Desk("ab")
    before = desk.state
    desk.tell(event)
    (ignored,) = desk.reasons
    assert isinstance(ignored, EventIgnored)
    assert ignored.event == type(event).__name__
    assert what in ignored.detail
    assert desk.state == before


def test_what_is_no_event_or_no_request_is_ignored_with_a_reason() -> None:
    desk = Desk("a")
    noise: Any = (None, "join", ask("r"), ReplicaDraining("a"))
    desk.tell(*noise)
    assert desk.reasons == [EventIgnored("event", "it is no event of a router")] * 3
    assert desk["a"].draining, "the events after them count"
    nothing: Any = None
    found = route(desk.config, desk.state, nothing)
    assert found.reason == Invalid("it is no RoutingRequest")
    assert (found.replica, found.state) == (None, desk.state)


def test_every_event_sweeps_one_shard_after_a_replica_left() -> None:
    desk = Desk("ab")
    desk.tell(BlocksPublished("a", keys(*range(50))))
    desk.tell(*[RequestStarted("none")] * 9)
    assert desk.state.index.cursor == 0
    desk.tell(ReplicaLeft("a"))
    assert desk.state.index.cursor == 1
    desk.tell(*[RequestStarted("none")] * (SHARDS - 2))
    assert desk.state.index.leaving
    desk.tell(RequestStarted("none"))
    assert not desk.state.index.leaving
    assert not any(desk.state.index.shards.values())


GOOD = Estimate("a", 1, 1.0)


@pytest.mark.parametrize(
    ("answer", "flaw"),
    [
        (None, "returned no pair"),
        ((ReplicaChoice("b", "why"),), "returned no pair"),
        ([ReplicaChoice("b", "why"), None], "returned no pair"),
        (("b", None), "returned no ReplicaChoice"),
        ((ReplicaChoice("b", None), None), "returned no ReplicaChoice"),  # type: ignore[arg-type] # it is tried
        ((ReplicaChoice("x", "why"), None), "chose a replica"),
        ((ReplicaChoice("c", "why"), None), "chose a replica"),
        ((None, None), "deferred a tenant of which nothing waits"),
        ((ReplicaChoice("b", "why", float("nan")), None), "estimated a time"),
        ((ReplicaChoice("b", "why", "1"), None), "estimated a time"),  # type: ignore[arg-type] # it is tried
        ((ReplicaChoice("b", "why", 1.0, [GOOD]), None), "returned alternatives"),  # type: ignore[arg-type] # it is tried
        ((ReplicaChoice("b", "why", 1.0, (GOOD, "a")), None), "returned alternatives"),  # type: ignore[arg-type] # it is tried
        (
            (ReplicaChoice("b", "", 1.0, (Estimate("a", 1.5, 1.0),)), 0),  # type: ignore[arg-type] # it is tried
            "returned alternatives",
        ),
        (
            (ReplicaChoice("b", "", 1.0, (Estimate(0, 1, 1.0),)), 0),  # type: ignore[arg-type] # it is tried
            "returned alternatives",
        ),
        (
            (ReplicaChoice("b", "", 1.0, (Estimate("a", 1, None),)), 0),  # type: ignore[arg-type] # it is tried
            "returned alternatives",
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_overridden(answer: Any, flaw: str) -> None:
    desk = Desk("abc", Answers(answer))
    desk.tell(ReplicaDraining("c"), Dispatched("a", ask("q", tenant="y")))
    found = desk.route(ask("r", tenant="x"))
    assert isinstance(found.reason, Placed)
    assert found.replica == "b", "the one with fewest requests"
    assert found.reason.why == "load"
    assert flaw in found.reason.override
    assert desk.state.policy is None


def test_a_policy_that_raises_is_overridden() -> None:
    class Raises(RoutingPolicy):
        def choose(self, *_: Any) -> Any:
            raise OSError

    found = Desk("ab", Raises()).route(ask("r"))
    assert isinstance(found.reason, Placed)
    assert found.reason.override == "raised OSError"


def test_good_answers_are_taken_as_they_are() -> None:
    desk = Desk("ab", Answers((ReplicaChoice("b", "why", 1, (GOOD,)), 7)))
    found = desk.route(ask("r"))
    assert isinstance(found.reason, Placed)
    assert (found.reason.override, found.reason.alternatives) == ("", (GOOD,))
    assert desk.state.policy == 7


def test_a_tenant_of_which_something_waits_may_be_deferred() -> None:
    desk = Desk("ab", Answers((None, 7)))
    desk.tell(Dispatched("a", ask("q", 1, tenant="x")))
    desk.tell(Dispatched("b", ask("p", tenant="x")), Dispatched("b", ask("o")))
    found = desk.route(ask("r", tenant="x"))
    assert (found.replica, found.reason) == (None, Deferred("r", "x", 20))
    assert desk.state.policy == 7
    assert "r" not in desk.state.requests
    desk.tell(RequestStarted("q"), RequestStarted("p"))
    assert desk.placed(ask("r", tenant="x")) == "a"


def test_a_policy_that_cannot_start_is_refused() -> None:
    class Broken(Answers):
        def start(self) -> Any:
            raise OSError("why")

    with pytest.raises(ConfigError, match=r"routing policy Broken: start\(\).*why"):
        initial_router(RouterConfig(Broken(None)))


def test_a_block_has_a_token_at_least() -> None:
    assert RouterConfig(Answers(None)).block_size == 64
    with pytest.raises(ConfigError, match="block_size must be"):
        RouterConfig(Answers(None), 0)
