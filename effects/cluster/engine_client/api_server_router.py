"""An API server's router among replicas of the engine: the pure one of `minfer.routing`,
fed with what this API server sees and what all engines report.

    EngineReady, CachedKeys, EngineLoad, a link that is over --> apply --+
    requests of this API server: started, ended, moved --------> apply --+--> state
    a request of this API server ------------------------------> route --+

Each API server has one of its own. What the others send is known by the loads that
engines report.
"""

from typing import Final

from minfer.effects.cluster.dispatch.dispatcher import RecordedRouter
from minfer.effects.cluster.link import link_messages as wire
from minfer.records.request import Request
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    LoadReport,
    RouterEvent,
    RoutingRequest,
)

# Tokens. If a request may have as many output tokens, how many are expected is left to
# the policy: where clients leave the bound out, it is all of the context.
MAX_EXPECTED_OUTPUT: Final = 256


class ApiServerRouter(RecordedRouter):
    """The router of one API server."""

    def note_keys(self, replica: str, cached_keys: wire.CachedKeys) -> None:
        """Fold what entered and left the cache of a replica."""
        events: list[RouterEvent] = [CacheCleared(replica)] if cached_keys.cleared else []
        if cached_keys.evicted:
            events.append(BlocksEvicted(replica, cached_keys.evicted))
        if cached_keys.published:
            events.append(BlocksPublished(replica, cached_keys.published))
        self.apply(*events)

    def note_load(self, replica: str, load: wire.EngineLoad) -> None:
        """Fold the load of a replica."""
        self.apply(
            LoadReport(
                replica,
                load.waiting,
                load.running,
                load.prefill,
                load.pages,
                load.adapters,
            )
        )


def routing_request(request: Request, session: str = "") -> RoutingRequest:
    """Returns what the router must know of a request."""
    return RoutingRequest(
        id=request.id,
        keys=request.keys if request.reads_cache else (),
        tokens=len(request.prompt),
        tenant=request.client,
        session=session,
        adapter=request.adapter,
        output=request.max_tokens if request.max_tokens < MAX_EXPECTED_OUTPUT else None,
    )
