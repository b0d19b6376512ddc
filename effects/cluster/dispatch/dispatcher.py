"""Assigns requests to replicas, or has them wait, in one queue for each tenant: for a
front of several engines, and for a proxy of several servers.

Theory. `minfer.routing` decides; here its events come from what happens, all of them in
one thread. Nothing here waits: owners submit requests with what they keep of them, and
get them back, assigned.

    submit ---> its tenant's queue ---> decide ---> assigned ---> deliver
                 (users take turns)       |
                        ^    deferred     |   one of the tenant started or ended,
                        +-----------------+   or a replica joined, drains or left
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol

from attrs import frozen

from minfer.effects.cluster.dispatch.tenant_queue import Item, TenantQueue, Waiting
from minfer.routing.messages import (
    Decision,
    Deferred,
    Dispatched,
    NoReplica,
    Placed,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.router import AppliedEvents, Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState


class RoutingRecorder(Protocol):
    """Gets every input of a router, with its result: a journal."""

    def applied(self, events: tuple[RouterEvent, ...], result: AppliedEvents) -> None:
        """Record events."""
        ...

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Record a decision."""
        ...


class RecordedRouter:
    """A router's state, as events and decisions change it. Methods belong to one
    thread.
    """

    def __init__(
        self, config: RouterConfig, recorder: RoutingRecorder | None = None
    ) -> None:
        self.state: RouterState = initial_router(config)
        self.config = config
        self._recorder = recorder

    def apply(self, *events: RouterEvent) -> None:
        """Fold events into the state."""
        result = apply(self.config, self.state, events)
        self.state = result.state
        if self._recorder is not None:
            self._recorder.applied(events, result)

    def decide(self, request: RoutingRequest) -> Decision:
        """Decide where a request goes; if it is placed, it counts there from now on."""
        result = route(self.config, self.state, request)
        self.state = result.state
        if self._recorder is not None:
            self._recorder.routed(request, result)
        return result.reason

    def dispatch(self, request: RoutingRequest, replica: str, reason: str) -> Placed:
        """Count a request at a replica without a decision; returns that as a decision."""
        self.apply(Dispatched(replica, request))
        blocks, tokens = len(request.keys), request.tokens
        return Placed(request.id, replica, reason, hit=0, blocks=blocks, prefill=tokens)

    def settle(self, event: RequestStarted | RequestEnded) -> str | None:
        """Fold the start or the end of a request; returns its tenant, or None if it is on
        no replica.
        """
        name = self.state.requests.get(event.id)
        if name is None:  # its replica has left, or it was never placed
            return None
        tenant = self.state.replicas[name].live[event.id].tenant
        self.apply(event)
        return tenant


@frozen
class Assignment(Generic[Item]):
    """A request that goes to a replica, and why."""

    item: Item
    request: RoutingRequest
    placed: Placed


class Dispatcher(Generic[Item]):
    """The requests that wait for a replica: for one of `router`, and while none of these
    takes requests, for one of `fallback_router`.

    `on_assigned` gets the requests that are assigned, all of one call together. If there
    is no replica, `on_refused` gets the request, which is then removed; without
    `on_refused` the request waits.
    """

    def __init__(
        self,
        router: RecordedRouter,
        on_assigned: Callable[[Sequence[Assignment[Item]]], None],
        on_refused: Callable[[Item], None] | None = None,
        fallback_router: RecordedRouter | None = None,
    ) -> None:
        self.router = router
        self.routers = [router] if fallback_router is None else [router, fallback_router]
        self._deliver = on_assigned
        self._refuse = on_refused
        self._waiting: dict[str, Waiting[Item]] = {}  # by id
        self._queues: dict[str, TenantQueue[Item]] = {}  # by tenant, none of them empty

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def has(self, name: str) -> bool:
        """Returns whether a request waits."""
        return name in self._waiting

    # --- requests -----------------------------------------------------------------------

    def submit(self, waiting_requests: Iterable[Waiting[Item]]) -> None:
        """Assign requests, or have them wait, behind those of their tenants that do."""
        assigned: list[Assignment[Item]] = []
        for waiting in waiting_requests:
            tenant = waiting.request.tenant
            if tenant in self._queues or not self._try_assign(waiting, assigned):
                self._queues.setdefault(tenant, TenantQueue()).add(waiting)
                self._waiting[waiting.request.id] = waiting
        if assigned:
            self._deliver(assigned)

    def remove(self, name: str) -> None:
        """Remove a request, if it waits."""
        if (waiting := self._waiting.pop(name, None)) is not None:
            queue = self._queues[waiting.request.tenant]
            queue.remove(waiting)
            if not queue:
                del self._queues[waiting.request.tenant]

    def settle(self, *events: RequestStarted | RequestEnded) -> None:
        """Note that requests have started or ended: others of their tenants may have
        waited for that.
        """
        tenants = [router.settle(event) for event in events for router in self.routers]
        self.wake(dict.fromkeys(tenant for tenant in tenants if tenant is not None))

    def wake(self, tenants: Iterable[str] | None = None) -> None:
        """Assign requests that wait, of these tenants or of all, as far as possible."""
        assigned: list[Assignment[Item]] = []
        for tenant in (*self._queues,) if tenants is None else tenants:
            while (queue := self._queues.get(tenant)) is not None:
                first = queue.first()
                if not self._try_assign(first, assigned):
                    break
                self.remove(first.request.id)
        if assigned:
            self._deliver(assigned)

    def _try_assign(
        self, waiting: Waiting[Item], assigned: list[Assignment[Item]]
    ) -> bool:
        """Add a request to those that are `assigned`, or refuse it; False if it has to
        wait.
        """
        for router in self.routers:
            decision = router.decide(waiting.request)
            if not isinstance(decision, NoReplica):
                break
        if isinstance(decision, Placed):
            assigned.append(Assignment(waiting.item, waiting.request, decision))
        elif isinstance(decision, Deferred) or self._refuse is None:
            return False
        else:
            self._refuse(waiting.item)
        return True

    # --- replicas -----------------------------------------------------------------------

    def join(self, name: str, *extra: RouterEvent) -> None:
        """Note that a replica takes requests; fold `extra` events with that."""
        self.router.apply(ReplicaJoined(name), *extra)
        self.wake()

    def drain(self, name: str, *before: RouterEvent) -> None:
        """Note that a replica takes no more requests; first fold events `before`."""
        self.router.apply(*before, ReplicaDraining(name))
        self.wake()

    def leave(self, name: str) -> None:
        """Note that a replica has gone, if it was there; its requests are lost."""
        if name in self.router.state.replicas:
            self.router.apply(ReplicaLeft(name))
            self.wake()
