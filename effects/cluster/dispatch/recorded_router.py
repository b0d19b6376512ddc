"""A live router: the state of `minfer.routing`, with a record of inputs and decisions."""

from typing import Protocol

from minfer.routing.messages import (
    Decision,
    Dispatched,
    Ended,
    Placed,
    RouterEvent,
    RoutingRequest,
    Started,
)
from minfer.routing.router import Applied, Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig, RouterState


class RoutingRecorder(Protocol):
    """Gets every input of a router, with its result: a journal."""

    def applied(self, events: tuple[RouterEvent, ...], result: Applied) -> None:
        """Record events."""
        ...

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Record a decision."""
        ...


class RecordedRouter:
    """A router's state, as events and decisions change it. Methods belong to one
    thread.
    """

    def __init__(self, config: RouterConfig, recorder: RoutingRecorder | None) -> None:
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

    def dispatch(self, request: RoutingRequest, replica: str, why: str) -> Placed:
        """Count a request at a replica without a decision; returns that as a decision."""
        self.apply(Dispatched(replica, request))
        blocks, tokens = len(request.keys), request.tokens
        return Placed(request.id, replica, why, hit=0, blocks=blocks, prefill=tokens)

    def settle(self, event: Started | Ended) -> str | None:
        """Fold the start or the end of a request; returns its tenant, or None if it is on
        no replica.
        """
        name = self.state.requests.get(event.id)
        if name is None:  # its replica has left, or it was never placed
            return None
        tenant = self.state.replicas[name].live[event.id].tenant
        self.apply(event)
        return tenant
