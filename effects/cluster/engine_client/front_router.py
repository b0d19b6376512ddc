"""A front's router among replicas of the engine: the pure one of `minfer.routing`, fed
with what this front sees and what all engines report.

    EngineReady, CachedKeys, EngineLoad, a link that is over ---> apply ---+
    this front's requests that start, end, or are moved ---------> apply --+--> state
    a request of this front --------------------------------------> route -+

Each front has one of its own. What the others send is known by the loads that engines
report.
"""

from collections import Counter
from typing import Final

from minfer.effects.cluster.dispatch.recorded_router import (
    RecordedRouter,
    RoutingRecorder,
)
from minfer.effects.cluster.link import link_messages as wire
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
from minfer.routing.state import RouterConfig

# If a request may have as many output tokens, how many are expected is left to the
# policy: where clients leave the bound out, it is all of the context.
USUAL: Final = 256
RESUMED: Final = "resumed"  # for metrics, of one that was on another replica before


class FrontRouter(RecordedRouter):
    """The router of one front. `routed` counts its decisions, by the name of the replica,
    a space, and why.
    """

    def __init__(
        self, config: RouterConfig, recorder: RoutingRecorder | None = None
    ) -> None:
        super().__init__(config, recorder)
        self.routed = Counter[str]()

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
        decision = self.decide(routing_request(request, session))
        if isinstance(decision, Placed):
            self.count(decision.replica, RESUMED if again else decision.why)
        return decision

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
