"""A front's router among replicas of the engine: the pure one of `minfer.routing`, fed
with what this front sees and what all engines report.

    EngineReady, CachedKeys, EngineLoad, a link that is over ---> apply ---+
    this front's requests that start, end, or are moved ---------> apply --+--> state
    a request of this front --------------------------------------> route -+

Each front has one of its own. What the others send is known by the loads that engines
report. Every input is recorded, if there is a journal, and replays.
"""

from collections import Counter
from typing import Final, Protocol

from minfer.effects.live.link import link_messages as wire
from minfer.records.request import Request
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Decision,
    LoadReport,
    Placed,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.router import Applied, Routed, apply, initial_router, route
from minfer.routing.state import RouterConfig

# A request that may have more output tokens is taken to have a usual number: clients
# leave the bound out, and it is all of the context then.
USUAL: Final = 256
RESUMED: Final = "resumed"  # for metrics, of one that was on another replica before


class RoutingRecorder(Protocol):
    """Gets every input of a router, with its result: a journal."""

    def applied(self, events: tuple[RouterEvent, ...], result: Applied) -> None:
        """Record events."""
        ...

    def routed(self, request: RoutingRequest, result: Routed) -> None:
        """Record a decision."""
        ...


class FrontRouter:
    """The router of one front. `routed` counts its decisions, by the name of the replica,
    a space, and why.
    """

    def __init__(
        self, config: RouterConfig, recorder: RoutingRecorder | None = None
    ) -> None:
        self.config = config
        self.state = initial_router(config)
        self.routed = Counter[str]()
        self._recorder = recorder

    def apply(self, *events: RouterEvent) -> None:
        """Fold events."""
        result = apply(self.config, self.state, events)
        self.state = result.state
        if self._recorder is not None:
            self._recorder.applied(events, result)

    def note_keys(self, replica: str, news: wire.CachedKeys) -> None:
        """Fold what entered and left the cache of a replica."""
        events: list[RouterEvent] = [CacheCleared(replica)] if news.cleared else []
        if news.evicted:
            events.append(BlocksEvicted(replica, news.evicted))
        if news.published:
            events.append(BlocksPublished(replica, news.published))
        self.apply(*events)

    def note_load(self, replica: str, load: wire.EngineLoad) -> None:
        """Fold the load of a replica."""
        self.apply(
            LoadReport(replica, load.waiting, load.running, load.prefill, load.pages)
        )

    def has(self, request: str) -> bool:
        """Returns whether a request is on a replica."""
        return request in self.state.requests

    def route(self, request: Request, session: str, *, again: bool) -> Decision:
        """Decide where a request goes; `again`: it was on a replica before."""
        asked = routing_request(request, session)
        result = route(self.config, self.state, asked)
        self.state = result.state
        if self._recorder is not None:
            self._recorder.routed(asked, result)
        if isinstance(result.reason, Placed):
            self.count(result.reason.replica, RESUMED if again else result.reason.why)
        return result.reason

    def count(self, replica: str, why: str) -> None:
        """Count a request that goes to a replica."""
        self.routed[f"{replica} {why}"] += 1


def routing_request(request: Request, session: str = "") -> RoutingRequest:
    """Returns what the router must know of a request."""
    return RoutingRequest(
        id=request.id,
        keys=request.keys if request.reads_cache else (),
        tokens=len(request.prompt),
        tenant=request.client,
        session=session,
        output=request.max_tokens if request.max_tokens < USUAL else None,
    )
