"""To which replicas a router sent each request, and how each request left them: a fold
over the turns of the router's journal.

    placed, or Dispatched ---> at a replica ---> RequestEnded    end: "ended"
                               (RequestStarted:  ReplicaLeft     end: "lost"
                               its first token)  routed again    end: "moved"
                                                 none of these   end: ""
"""

from collections import Counter
from typing import Final

from attrs import define, field

from minfer.journal.routing_journal import RoutingTurn
from minfer.routing.messages import (
    Deferred,
    Dispatched,
    Placed,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)

ENDED: Final = "ended"
LOST: Final = "lost"  # the replica left with it
MOVED: Final = "moved"  # it was routed again


@define
class RoutedRequest:
    """A request at a replica to which a router sent it."""

    id: str
    replica: str
    turn: int  # of the journal, in which it was sent
    placed: Placed | None  # the decision; None: it was sent without one
    deferred: int = 0  # times that the router deferred it before it was sent
    started: bool = False  # whether its first token came from there
    end: str = ""  # how it left: ENDED, LOST, MOVED; empty: it was there at the end


@define(eq=False)
class RoutedRequests:
    """The requests of the turns so far."""

    all: list[RoutedRequest] = field(factory=list)  # in the order in which they were sent
    _at_replica: dict[str, RoutedRequest] = field(factory=dict)  # by id
    _deferred: Counter[str] = field(factory=Counter)

    def turn(self, turn: RoutingTurn) -> None:
        """Take the next turn of the journal."""
        if not isinstance(turn.inputs, RoutingRequest):
            for event in turn.inputs:
                self._event(event, turn.number)
            return
        self._end(turn.inputs.id, MOVED)
        match getattr(turn.result, "reason", None):
            case Placed() as placed:
                self._send(placed.id, placed.replica, turn.number, placed)
            case Deferred(name):
                self._deferred[name] += 1

    def _event(self, event: RouterEvent, number: int) -> None:
        match event:
            case RequestStarted(name):
                if (request := self._at_replica.get(name)) is not None:
                    request.started = True
            case RequestEnded(name):
                self._end(name, ENDED)
            case Dispatched(replica, request):
                self._end(request.id, MOVED)
                self._send(request.id, replica, number, None)
            case ReplicaLeft(replica):
                for sent in [*self._at_replica.values()]:
                    if sent.replica == replica:
                        self._end(sent.id, LOST)

    def _send(self, name: str, replica: str, number: int, placed: Placed | None) -> None:
        deferred = self._deferred.pop(name, 0)
        request = RoutedRequest(name, replica, number, placed, deferred)
        self._at_replica[name] = request
        self.all.append(request)

    def _end(self, name: str, end: str) -> None:
        if (request := self._at_replica.pop(name, None)) is not None:
            request.end = end
