"""The accounts of a replica's load: before and after reports, starts and ends."""

from minfer.routing.accounts import MAX_ADAPTERS, prefill_tokens
from minfer.routing.messages import (
    Dispatched,
    LoadReport,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
)
from minfer.routing.state import Dispatch
from minfer.values.pmap import Map
from tests.core.routing.routers import Desk, ask


def test_at_least_one_token_is_computed() -> None:
    assert prefill_tokens(25, 2, 10) == 5
    assert prefill_tokens(25, 0, 10) == 25
    assert prefill_tokens(20, 2, 10) == 1
    assert prefill_tokens(22, 2, 10) == 2
    assert prefill_tokens(0, 0, 10) == 1


def test_without_reports_a_replica_has_what_was_dispatched_and_has_not_ended() -> None:
    desk = Desk("a")
    desk.tell(Dispatched("a", ask("1", 1, 2, tenant="x")))
    desk.tell(Dispatched("a", ask("2", 1, tenant="x")), Dispatched("a", ask("3")))
    one = desk["a"]
    assert (one.requests, one.backlog) == (3, 25 + 15 + 5)
    assert (dict(one.waiting), one.waiting_tokens) == ({"x": 40, "": 5}, 45)
    assert dict(desk.state.requests) == dict.fromkeys("123", "a")
    desk.tell(RequestStarted("1"))
    one = desk["a"]
    assert (one.requests, one.backlog) == (3, 20)
    assert (dict(one.waiting), one.waiting_tokens) == ({"x": 15, "": 5}, 20)
    assert one.live["1"] == Dispatch("x", 25, 0, started=True)
    desk.tell(RequestStarted("1"))
    assert desk["a"] == one
    desk.tell(RequestEnded("1"), RequestEnded("2"))
    one = desk["a"]
    assert (one.requests, one.backlog) == (1, 5)
    assert (dict(one.waiting), one.waiting_tokens) == ({"": 5}, 5)
    assert dict(one.live) == {"3": Dispatch("", 5, 0)}
    desk.tell(RequestEnded("3"))
    assert desk["a"] == Desk("a")["a"]
    assert desk.state.requests == Map()


def test_the_latest_adapters_are_remembered() -> None:
    names = [str(number) for number in range(MAX_ADAPTERS + 1)]
    desk = Desk("a")
    desk.tell(*[Dispatched("a", ask(name, adapter=name)) for name in names])
    assert desk["a"].adapters == tuple(names[1:])
    desk.tell(Dispatched("a", ask("again", adapter="2")), Dispatched("a", ask("none")))
    assert desk["a"].adapters == ("1", *names[3:], "2")
    desk.tell(LoadReport("a", 0, 0, 0, 64))
    assert len(desk["a"].adapters) == MAX_ADAPTERS
    desk.tell(LoadReport("a", 0, 0, 0, 64, adapters=("7",)))
    assert desk["a"].adapters == ("7",)


def test_a_report_stands_for_all_that_was_dispatched_before_it() -> None:
    desk = Desk("a")
    desk.tell(Dispatched("a", ask("1", 1)), Dispatched("a", ask("2", 1)))
    desk.tell(LoadReport("a", waiting=2, running=3, prefill=70, pages=8))
    desk.tell(Dispatched("a", ask("3", 1, 2)))
    one = desk["a"]
    assert (one.requests, one.backlog, one.pages, one.reports) == (6, 95, 8, 1)
    assert one.waiting_tokens == 15 + 15 + 25
    # The next report will tell of these.
    desk.tell(RequestStarted("1"), RequestEnded("2"))
    one = desk["a"]
    assert (one.requests, one.backlog, one.waiting_tokens) == (6, 95, 25)
    desk.tell(RequestStarted("3"))
    assert (desk["a"].requests, desk["a"].backlog) == (6, 70)
    desk.tell(RequestEnded("3"))
    assert (desk["a"].requests, desk["a"].backlog) == (5, 70)
    desk.tell(LoadReport("a", 0, 0, 0))
    one = desk["a"]
    assert (one.requests, one.backlog, one.pages, one.reports) == (0, 0, None, 2)


def test_a_request_is_on_one_replica() -> None:
    desk = Desk("ab")
    desk.tell(Dispatched("a", ask("1", 1)), Dispatched("b", ask("1", 1)))
    assert (desk["a"].requests, desk["b"].requests) == (0, 1)
    assert dict(desk.state.requests) == {"1": "b"}
    assert (desk["a"].backlog, desk["b"].backlog) == (0, 15)


def test_a_replica_that_leaves_takes_its_requests_with_it() -> None:
    desk = Desk("ab")
    for name, replica in (("2", "a"), ("1", "a"), ("3", "b")):
        desk.tell(Dispatched(replica, ask(name)))
    desk.tell(ReplicaLeft("a"))
    assert dict(desk.state.requests) == {"3": "b"}
    (lost,) = desk.reasons
    assert (lost.replica, lost.ids) == ("a", ("1", "2"))
