"""To which replicas a router sent each request, and how each request left them: a fold
over the turns of the router's journal.

    placed, or Dispatched ---> at a replica ---> Ended           end: "ended"
                               (Started: its     ReplicaLeft     end: "lost"
                               first token)      routed again    end: "moved"
                                                 none of these   end: ""
"""

from collections import Counter
from typing import Final

from attrs import define, field

from minfer.journal.routing_journal import RoutingTurn
from minfer.routing.messages import (
    Deferred,
    Dispatched,
    Ended,
    Placed,
    ReplicaLeft,
    RouterEvent,
    RoutingRequest,
    Started,
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
    _there: dict[str, RoutedRequest] = field(factory=dict)  # those at a replica, by id
    _deferred: Counter[str] = field(factory=Counter)

    def turn(self, turn: RoutingTurn) -> None:
        """Take the next turn of the journal."""
        if not isinstance(turn.taken, RoutingRequest):
            for event in turn.taken:
                self._event(event, turn.number)
            return
        self._end(turn.taken.id, MOVED)
        match getattr(turn.result, "reason", None):
            case Placed() as placed:
                self._send(placed.id, placed.replica, turn.number, placed)
            case Deferred(name):
                self._deferred[name] += 1

    def _event(self, event: RouterEvent, number: int) -> None:
        match event:
            case Started(name):
                if (one := self._there.get(name)) is not None:
                    one.started = True
            case Ended(name):
                self._end(name, ENDED)
            case Dispatched(replica, request):
                self._end(request.id, MOVED)
                self._send(request.id, replica, number, None)
            case ReplicaLeft(replica):
                for one in [*self._there.values()]:
                    if one.replica == replica:
                        self._end(one.id, LOST)

    def _send(self, name: str, replica: str, number: int, placed: Placed | None) -> None:
        deferred = self._deferred.pop(name, 0)
        one = RoutedRequest(name, replica, number, placed, deferred)
        self._there[name] = one
        self.all.append(one)

    def _end(self, name: str, how: str) -> None:
        if (one := self._there.pop(name, None)) is not None:
            one.end = how
