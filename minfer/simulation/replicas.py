"""Simulation of several replicas behind the router, on one virtual clock.

Theory. Each replica is an engine of its own (`minfer.simulation.simulated_engine`), with
its device and its cache. What happens first is next: an arrival, which is routed in the
state of that moment, or the earliest turn that is due on any replica, whose cache
changes, starts and ends the router then knows. A deferred request waits for a turn that
starts or ends another one, and is routed again before later ones.

A steady decode (`minfer.simulation.steady`) changes nothing that another replica sees,
and of what the router sees only the cache, which it looks at when a request is routed. So
a replica takes such turns up to the next arrival at once, though others have turns
before; but if a turn of another replica could send it a request, only up to that.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from attrs import define, field, frozen

from minfer.journal.overrides import OverrideCounts
from minfer.records.config import EngineConfig
from minfer.records.messages import Cancel, Event, Submit
from minfer.records.request import Request
from minfer.records.sequence import SampleId
from minfer.records.state import EngineState, Turn
from minfer.routing.messages import (
    Deferred,
    ReplicaJoined,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.replica_events import cache_events, load_report, replica_events
from minfer.routing.router import Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState
from minfer.simulation.collector import paused_collector
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import IDLE, Arrival, Simulated
from minfer.simulation.simulated_engine import NoteCache, SimulatedEngine
from minfer.simulation.steady import SteadyTurns


@frozen
class ReplicaTurn:
    """A turn of a replica."""

    replica: str
    turn: Turn


@frozen
class ReplicaSteadyTurns:
    """Turns of a steady decode of a replica."""

    replica: str
    turns: SteadyTurns


@frozen
class RoutedArrival:
    """A request that was routed, at `time`: later than it arrived, if it was deferred."""

    time: float  # seconds
    request: Request
    routed: Routed


def routing_request(request: Request) -> RoutingRequest:
    """What the router must know of a request; its place in a session is not known."""
    return RoutingRequest(
        id=request.id,
        keys=request.keys,
        tokens=len(request.prompt),
        tenant=request.client,
        output=request.max_tokens,
        adapter=request.adapter,
    )


def joined(router: RouterConfig, names: tuple[str, ...]) -> RouterState:
    """A router that these replicas have joined."""
    events = tuple(map(ReplicaJoined, names))
    return apply(router, initial_router(router), events).state


@define
class SimulatedReplica:
    """A replica: its engine, and requests that are on their way to it."""

    name: str
    engine: SimulatedEngine
    coming: deque[tuple[float, Event]] = field(factory=deque)
    unstarted: set[str] = field(factory=set)
    next_report: float = 0.0

    @property
    def due(self) -> float:
        """When its next turn is due."""
        if self.engine.idle >= IDLE:
            return math.inf
        return self.engine.due(self.coming[0][0] if self.coming else math.inf)

    def steady_turns(self, until: float, note_cache: NoteCache) -> SteadyTurns | None:
        """Take the next turns, if they are steady decode and due before `until`. `due`
        must have been read.
        """
        if self.coming:
            until = min(until, self.coming[0][0])
        # An id may be used again before the request that has it is over.
        if self.unstarted and any(
            request_id in self.unstarted
            for request_id, _ in self.engine.state.running.ids
        ):
            return None
        return self.engine.take_steady(until, note_cache)

    def turn(self, now: float) -> Turn:
        """Take the turn that is due now."""
        arrived = []
        while self.coming and self.coming[0][0] <= now:
            arrived.append(self.coming.popleft()[1])
        turn = self.engine.take(now, arrived)
        self.engine.launch(turn)
        return turn


@define
class ReplicaSimulation:
    """Replicas with one configuration and one cost of steps, under a router. `arrivals`
    are in order of time. Python's garbage collector is paused while it runs.

    A replica reports its load in the first turn after each `report_every` seconds; never,
    if that is infinite. `overrides` counts those of the scheduling policy on all
    replicas, as that of `Simulation` does.
    """

    config: EngineConfig
    router: RouterConfig
    names: tuple[str, ...]  # of the replicas
    cost: CostModel
    arrivals: Iterable[Arrival]
    lengths: Mapping[SampleId, int] | None = None  # as of `Simulated`
    report_every: float = math.inf  # seconds
    overrides: OverrideCounts = field(factory=OverrideCounts)
    state: RouterState = field(init=False)
    _replicas: dict[str, SimulatedReplica] = field(init=False)
    _deferred: deque[Request] = field(init=False, factory=deque)

    def __attrs_post_init__(self) -> None:
        self._replicas = self._new_replicas(self.names, self.config)
        self.state = joined(self.router, self.names)

    def _new_replicas(
        self, names: tuple[str, ...], config: EngineConfig
    ) -> dict[str, SimulatedReplica]:
        """Replicas with nothing to do yet."""
        engines = (
            SimulatedEngine(
                config, Simulated(self.lengths), self.cost, overrides=self.overrides
            )
            for _ in names
        )
        pairs = zip(names, engines, strict=True)
        return {name: SimulatedReplica(name, engine) for name, engine in pairs}

    def run(self) -> Iterator[ReplicaTurn | RoutedArrival]:
        """Route and take turns until everything has been served, or nothing can happen
        any more.
        """
        with paused_collector():
            for item in self._run(skips=False):
                if not isinstance(item, ReplicaSteadyTurns):  # as all are
                    yield item

    def spans(self) -> Iterator[ReplicaTurn | ReplicaSteadyTurns | RoutedArrival]:
        """What `run` yields, but turns of a steady decode as one, which is faster where
        few requests run at once. The turns of each replica are in order, and so are
        arrivals and the turns that the router sees.
        """
        with paused_collector():
            yield from self._run(skips=True)

    def _run(
        self, *, skips: bool
    ) -> Iterator[ReplicaTurn | ReplicaSteadyTurns | RoutedArrival]:
        arrivals = iter(self.arrivals)
        coming = next(arrivals, None)
        due_times = {name: replica.due for name, replica in self._replicas.items()}
        while True:
            name = min(due_times, key=due_times.__getitem__, default="")
            now = due_times.get(name, math.inf)
            if coming and coming[0] <= now:
                yield from self._arrive(*coming, due_times)
                coming = next(arrivals, None)
                continue
            if now == math.inf:
                return
            replica = self._replicas[name]
            if skips:
                until = coming[0] if coming else math.inf
                until = self._undisturbed_until(replica, until, due_times)
                steady = replica.steady_turns(until, partial(self._note_cache, replica))
                if steady is not None:
                    due_times[name] = replica.due
                    yield ReplicaSteadyTurns(name, steady)
                    continue
            yield from self._turn(replica, now, due_times)

    def _note_cache(
        self, replica: SimulatedReplica, before: EngineState, after: EngineState
    ) -> None:
        """Tell the router what a turn has cached and evicted."""
        events = cache_events(replica.engine.config, replica.name, before, after)
        if events:
            self._apply(replica.name, events)

    def _apply(self, name: str, events: list[RouterEvent]) -> None:  # noqa: ARG002
        """Fold events of the replica `name` into the state of its router."""
        self.state = apply(self.router, self.state, tuple(events)).state

    def _undisturbed_until(
        self, replica: SimulatedReplica, arrival: float, due_times: dict[str, float]
    ) -> float:
        """The time up to which nothing happens to a replica but its own turns, if the
        next arrival is at `arrival`.
        """
        senders = self._senders(replica.name)
        times = [due_times[name] for name in senders if name != replica.name]
        if self.report_every < math.inf:
            times.append(replica.next_report)
        return min([arrival, *times])

    def _senders(self, name: str) -> Iterable[str]:  # noqa: ARG002  # of subclasses
        """The replicas whose turns may send requests to the replica `name`: while
        requests are deferred, all.
        """
        return self._replicas if self._deferred else ()

    def _arrive(
        self, time: float, arrival: Request | Cancel, due_times: dict[str, float]
    ) -> Iterator[RoutedArrival]:
        if isinstance(arrival, Request):
            yield self._route(time, arrival, due_times)
            return
        waiting = [request for request in self._deferred if request.id != arrival.id]
        self._deferred = deque(waiting)
        name = self._replica_of(arrival.id)
        if name is not None:
            self._send(name, time, arrival, due_times)

    def _replica_of(self, request_id: str) -> str | None:
        """The replica that has a request."""
        return self.state.requests.get(request_id)

    def _route(
        self, time: float, request: Request, due_times: dict[str, float]
    ) -> RoutedArrival:
        """Route a request, and send it to its replica."""
        routed = route(self.router, self.state, routing_request(request))
        self.state = routed.state
        if routed.replica is not None:
            self._replicas[routed.replica].unstarted.add(request.id)
            self._send(routed.replica, time, Submit(request), due_times)
        elif isinstance(routed.reason, Deferred):
            self._deferred.append(request)
        return RoutedArrival(time, request, routed)

    def _send(
        self, name: str, time: float, event: Event, due_times: dict[str, float]
    ) -> None:
        replica = self._replicas[name]
        replica.coming.append((time, event))
        due_times[name] = replica.due

    def _turn(
        self, replica: SimulatedReplica, now: float, due_times: dict[str, float]
    ) -> Iterator[ReplicaTurn | RoutedArrival]:
        """Take a turn of a replica, tell the router, and route what was deferred."""
        turn = replica.turn(now)
        due_times[replica.name] = replica.due
        events = self._events(self.config, replica, turn, now)
        if events:
            self.state = apply(self.router, self.state, tuple(events)).state
        yield ReplicaTurn(replica.name, turn)
        if self._deferred and any(
            isinstance(event, RequestStarted | RequestEnded) for event in events
        ):
            yield from self._route_deferred(now, due_times)

    def _events(
        self, config: EngineConfig, replica: SimulatedReplica, turn: Turn, now: float
    ) -> list[RouterEvent]:
        """What the router must know of a turn of a replica."""
        events = replica_events(config, replica.name, turn, replica.unstarted)
        if now >= replica.next_report and self.report_every < math.inf:
            replica.next_report = now + self.report_every
            events.append(load_report(config, replica.name, turn.transition.state))
        return events

    def _route_deferred(
        self, now: float, due_times: dict[str, float]
    ) -> Iterator[RoutedArrival]:
        """Route the deferred requests of each tenant, in order, up to one that stays
        deferred.
        """
        deferred, self._deferred = self._deferred, deque()
        deferred_clients = set[str]()
        for request in deferred:
            if request.client in deferred_clients:
                self._deferred.append(request)
                continue
            routed = self._route(now, request, due_times)
            if routed.routed.replica is None:
                deferred_clients.add(request.client)
            yield routed
