"""Replicas on one virtual clock: what is routed where, and that it is as if each replica
were simulated alone with what was routed to it.
"""

import math
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from attrs import evolve

from minfer.blocks.keys import block_keys
from minfer.records.messages import Cancel
from minfer.records.request import Request
from minfer.routing.messages import (
    Deferred,
    EventIgnored,
    Placed,
    ReplicaChoice,
    RoutingRequest,
)
from minfer.routing.policies import LeastLoaded, Prefix, RoundRobin
from minfer.routing.policy import RoutingPolicy
from minfer.routing.replica_events import load_report
from minfer.routing.router import apply
from minfer.routing.state import RouterConfig
from minfer.simulation import replicas as simulate_replicas
from minfer.simulation.replicas import (
    ReplicaSimulation,
    ReplicaTurn,
    RoutedArrival,
    routing_request,
)
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from tests.core.simulation.test_simulate import EVEN, Never, config_of, requested

NAMES = ("a", "b", "c")


def chats(count: int, seed: int = 1) -> list[Arrival]:
    """Requests that share prefixes, in order of time; some are cancelled."""
    rng, found = Random(seed), list[Arrival]()
    for number in range(count):
        prompt = (rng.randrange(3),) * rng.randrange(1, 30)
        time = number * rng.choice((0.3, 0.4))
        request = Request(
            id=f"{number}",
            prompt=prompt,
            max_tokens=rng.randrange(1, 8),
            client=rng.choice("xyz"),
            keys=block_keys(b"", prompt, 4),
        )
        found.append((time, request))
        if rng.random() < 0.1:
            found.append((time + 1, Cancel(f"{number}")))
    return sorted(found, key=lambda one: one[0])


def simulation(policy: Any, arrivals: list[Arrival], **more: Any) -> ReplicaSimulation:
    return ReplicaSimulation(
        config_of(num_blocks=20), RouterConfig(policy, 4), NAMES, EVEN, arrivals, **more
    )


@pytest.mark.parametrize("policy", [Prefix(token=0.1, row=0.01), RoundRobin()])
def test_each_replica_is_as_if_it_were_alone(policy: Any) -> None:
    arrivals = chats(60)
    run = simulation(policy, arrivals)
    alone: dict[str, list[Arrival]] = {name: [] for name in NAMES}
    turns: dict[str, list[Any]] = {name: [] for name in NAMES}
    homes, times = dict[str, str](), list[float]()
    for one in run.run():
        if isinstance(one, ReplicaTurn):
            turns[one.replica].append(one.turn)
            times.append(one.turn.transition.state.time)
        else:
            assert one.routed.replica is not None
            homes[one.request.id] = one.routed.replica
            alone[one.routed.replica].append((one.time, one.request))
            times.append(one.time)
    assert len(homes) == 60
    assert set(homes.values()) == set(NAMES)
    assert all(before <= after for before, after in pairwise(times))
    for time, what in arrivals:
        if isinstance(what, Cancel):
            alone[homes[what.id]].append((time, what))
    for name in NAMES:
        come = sorted(alone[name], key=lambda pair: pair[0])
        same = [*Simulation(run.config, Simulated(), EVEN, come).turns()]
        # Cancels of what has ended are not sent: those turns are left out.
        assert [t.transition.state for t in turns[name]] == [
            t.transition.state for t in same
        ][: len(turns[name])]
        assert len(same) - len(turns[name]) <= 3


def test_the_router_knows_what_replicas_cache_and_what_has_ended() -> None:
    """Its estimate of a hit is what the replica finds, unless that has evicted since."""
    run = simulation(Prefix(token=0.1, row=0.01), chats(80))
    caches = dict[str, set[bytes]]()
    for one in run.run():
        if isinstance(one, ReplicaTurn):
            nodes = one.turn.transition.state.blocks.prefix.nodes
            caches[one.replica] = {key for key in nodes if len(key) == 32}
        elif isinstance(one.routed.reason, Placed):
            placed = one.routed.reason
            keys = caches.get(placed.replica, set())
            known = [key in keys for key in one.request.keys]
            assert placed.hit == ([*known, False]).index(False)
    assert dict(run.state.requests) == {}
    assert all(one.requests == one.backlog == 0 for one in run.state.replicas.values())


def ignored_events(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[EventIgnored]:
    """The events that routers of these modules ignore from now on."""
    ignored = list[EventIgnored]()

    def watched(*args: Any) -> Any:
        applied = apply(*args)
        ignored.extend(one for one in applied.reasons if isinstance(one, EventIgnored))
        return applied

    for module in modules:
        monkeypatch.setattr(module, "apply", watched)
    return ignored


def test_no_event_of_a_replica_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = ignored_events(monkeypatch, simulate_replicas)
    assert [*simulation(LeastLoaded(), chats(40)).run()]
    assert ignored == []


def test_loads_are_reported_in_the_first_turn_after_each_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reports = list[float]()

    def watched(config: Any, name: str, state: Any) -> Any:
        if name == "a":
            reports.append(state.time)
        return load_report(config, name, state)

    monkeypatch.setattr(simulate_replicas, "load_report", watched)
    come: list[Arrival] = [(0.5, requested("1", most=9))]
    run = simulation(LeastLoaded(), come, report_every=2.5)
    assert [*run.run()]
    assert reports == [0.5, 3.5, 6.5, 9.5]
    assert run.state.replicas["a"].pages == 20
    reports.clear()
    assert [*simulation(LeastLoaded(), come).run()]
    assert reports == []


class OneAtATime(RoutingPolicy):
    """Defers a tenant while a request of it waits for prefill."""

    def choose(self, state: Any, request: RoutingRequest, candidates: Any) -> Any:
        if any(request.tenant in one.replica.waiting for one in candidates):
            return None, state
        return ReplicaChoice(candidates[0].replica.name, "first"), state


def test_deferred_requests_are_routed_in_order_when_others_have_started() -> None:
    come: list[Arrival] = [(0.0, requested(f"{n}", most=2)) for n in range(5)]
    come.append((0.1, Cancel("2")))
    come.append((0.2, requested("other", most=2, client="x")))
    come.append((0.3, requested("another", most=2, client="x")))
    found = [
        (one.time, one.request.id, isinstance(one.routed.reason, Deferred))
        for one in simulation(OneAtATime(), come).run()
        if isinstance(one, RoutedArrival)
    ]
    placed = [(time, name) for time, name, deferred in found if not deferred]
    assert placed[:3] == [(0.0, "0"), (0.2, "other"), (1.0, "1")]
    assert [name for _, name in placed if name.isdigit()] == ["0", "1", "3", "4"]
    assert [name for _, name in placed if not name.isdigit()] == ["other", "another"]
    before = [name for time, name, _ in found if time < 1]
    assert before == [*"01234", "other", "another"], "once, while none has started"
    again = [name for time, name, _ in found if time >= 1]
    assert again[:3] == ["1", "3", "another"], "one of each tenant that stays deferred"
    assert again.index("4") > len(again) - 1 - again[::-1].index("3")


def test_without_replicas_all_is_refused() -> None:
    run = ReplicaSimulation(
        config_of(), RouterConfig(LeastLoaded(), 4), (), EVEN, chats(5)
    )
    found = [*run.run()]
    assert len(found) == 5
    assert all(isinstance(o, RoutedArrival) and o.routed.replica is None for o in found)


def test_a_routing_request_has_what_decides() -> None:
    request = requested("r", prompt=9, most=7, client="x", keys=(b"1", b"2"))
    assert routing_request(request) == RoutingRequest("r", (b"1", b"2"), 9, "x", "", 7)
    assert simulation(LeastLoaded(), []).report_every == math.inf


def test_a_replica_that_admits_no_request_ends_the_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulate_replicas, "IDLE", 20)
    config = evolve(config_of(), policy=Never())
    router, come = RouterConfig(LeastLoaded(), 4), [(0.0, requested("1"))]
    found = [*ReplicaSimulation(config, router, NAMES, EVEN, come).run()]
    assert len(found) == 22  # the decision, the turn with the request, and idle ones
