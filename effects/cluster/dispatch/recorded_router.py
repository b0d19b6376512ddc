"""A live router: the state of `minfer.routing`, with a record of inputs and decisions."""

from typing import Protocol

from minfer.routing.messages import Decision, RouterEvent, RoutingRequest
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
