"""Places requests on backends, or has them wait.

Theory. `minfer.routing` decides; here its events come from what happens, each in the
event loop's thread.

    place ---> route ---> placed on a backend ---> started, ended
                 |  ^
        deferred |  | one of its tenant started or ended; a backend joined or left
                 v  |
              waiting, in its tenant's queue, in which users take turns

A request that is placed publishes the keys of its blocks for its backend at once
(`assumed_cache`), unless that backend reports what it caches.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

from attrs import define

from minfer.blocks.keys import Keys
from minfer.effects.cluster.dispatch.assumed_cache import AssumedCache
from minfer.effects.cluster.dispatch.recorded_router import (
    RecordedRouter,
    RoutingRecorder,
)
from minfer.effects.cluster.dispatch.tenant_line import TenantLine, Waiter
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    Deferred,
    Dispatched,
    Ended,
    Placed,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RouterEvent,
    RoutingRequest,
    Started,
)
from minfer.routing.state import Replica, RouterConfig


class NotPlacedError(Exception):
    """A request was refused: no backend takes requests, or too many wait."""


class TooManyWaitingError(NotPlacedError):
    """As many requests wait as may."""


@define
class RoutingCounts:
    """What was decided so far."""

    placed: int = 0  # requests, each as often as it was sent to a backend
    deferred: int = 0
    blocks: int = 0  # of the prompts of those that were placed
    hit_blocks: int = 0  # of these, expected in the cache of their backend


class Dispatcher(RecordedRouter):
    """Places requests on backends; all methods run in one event loop.

    `cache_blocks`: how many blocks each backend is assumed to cache. Those in `reporting`
    say themselves what they cache: all of it when called, and changes by `report`. At
    most `most_waiting` requests are deferred at a time.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        cache_blocks: int,
        most_waiting: int,
        journal: RoutingRecorder | None = None,
        reporting: Mapping[str, Callable[[], Keys]] | None = None,
    ) -> None:
        super().__init__(config, journal)
        self.counts = RoutingCounts()
        self.waiting = 0  # deferred requests
        self._cache_blocks = cache_blocks
        self._most_waiting = most_waiting
        self._reporting = reporting or {}
        self._caches: dict[str, AssumedCache] = {}
        self._lines: dict[str, TenantLine] = {}  # of tenants, none of them empty

    # --- backends -----------------------------------------------------------------------

    def available(self) -> list[Replica]:
        """The backends that take requests, by name."""
        found = (self.state.replicas[name] for name in self.state.names)
        return [one for one in found if not one.draining]

    def join(self, name: str) -> None:
        """A backend takes requests."""
        one = self.state.replicas.get(name)
        if one is None or one.draining:
            self.apply(ReplicaJoined(name), *(self._cached(name) if one is None else ()))
            self._wake_all()

    def drain(self, name: str) -> None:
        """A backend is well, and takes no more requests."""
        one = self.state.replicas.get(name)
        if one is None or not one.draining:
            new = (ReplicaJoined(name), *self._cached(name)) if one is None else ()
            self.apply(*new, ReplicaDraining(name))
            self._wake_all()

    def leave(self, name: str) -> None:
        """A backend is not there; its requests find out for themselves."""
        if name in self.state.replicas:
            self._caches.pop(name, None)
            self.apply(ReplicaLeft(name))
            self._wake_all()

    def report(self, name: str, *events: RouterEvent) -> None:
        """Take a backend's news of its cache. They are ignored while it is not there:
        `join` asks for all that is cached.
        """
        if name in self.state.replicas:
            self.apply(*events)

    def _cached(self, name: str) -> tuple[RouterEvent, ...]:
        """What a backend says that it has cached."""
        keys = self._reporting[name]() if name in self._reporting else ()
        return (BlocksPublished(name, keys),) if keys else ()

    def assumed_blocks(self, name: str) -> int:
        """Blocks that a backend is assumed to cache."""
        cache = self._caches.get(name)
        return 0 if cache is None else len(cache)

    # --- requests -----------------------------------------------------------------------

    async def place(self, request: RoutingRequest, user: str = "") -> str:
        """Returns the backend of a request of a tenant's `user`, once there is one. The
        caller must call `end`, even after an error. Raises NotPlacedError.
        """
        line = self._lines.get(request.tenant)
        name = None if line else self._route(request)
        return name or await self._wait(request, user)

    def send_to(self, name: str, request: RoutingRequest) -> None:
        """Count a request at a certain backend."""
        self.apply(Dispatched(name, request))
        self._note_placed(name, request)

    def elsewhere(self, request: RoutingRequest, tried: Collection[str]) -> str | None:
        """Move a request that could not be served: by the policy, if its backend has
        left, or else to one with the fewest requests; None if all were tried.
        """
        if request.id not in self.state.requests and self.available():
            name = self._route(request)
            if name is not None and name not in tried:
                return name
        others = [
            replica
            for replica in self.available()
            if replica.name not in tried
            and (request.allowed is None or replica.name in request.allowed)
        ]
        if not others:
            return None
        name = min(others, key=lambda one: (one.requests, one.backlog)).name
        self.send_to(name, request)
        return name

    def start(self, request: str) -> None:
        """The answer of a request has begun."""
        self._settle(request, Started(request))

    def end(self, request: str) -> None:
        """A request has ended, or was given up."""
        self._settle(request, Ended(request))

    def _settle(self, request: str, event: Started | Ended) -> None:
        name = self.state.requests.get(request)
        if name is None:  # its backend has left, or it was never placed
            return
        tenant = self.state.replicas[name].live[request].tenant
        self.apply(event)
        self._wake(tenant)

    def _route(self, request: RoutingRequest) -> str | None:
        """Its backend; None if it is deferred. Raises NotPlacedError."""
        decision = self.decide(request)
        if isinstance(decision, Deferred):
            return None
        if not isinstance(decision, Placed):
            raise NotPlacedError("no server behind this router takes requests now")
        self.counts.blocks += decision.blocks
        self.counts.hit_blocks += decision.hit
        self._note_placed(decision.replica, request)
        return decision.replica

    def _note_placed(self, name: str, request: RoutingRequest) -> None:
        self.counts.placed += 1
        if name in self._reporting or not request.keys:
            return
        cache = self._caches.setdefault(name, AssumedCache(self._cache_blocks))
        use = cache.use(request.keys)
        events: list[RouterEvent] = []
        if use.published:
            events.append(BlocksPublished(name, use.published))
        if use.evicted:
            events.append(BlocksEvicted(name, use.evicted))
        if events:
            self.apply(*events)

    # --- deferred requests --------------------------------------------------------------

    async def _wait(self, request: RoutingRequest, user: str) -> str:
        if self.waiting >= self._most_waiting:
            why = f"{self.waiting} requests wait, more than --max-waiting allows"
            raise TooManyWaitingError(why)
        waiter = Waiter(request, user, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(request.tenant, TenantLine())
        line.add(waiter)
        self.counts.deferred += 1
        self.waiting += 1
        try:
            return await waiter.placed
        finally:
            self.waiting -= 1
            line.remove(waiter)  # the client may have left
            self._drop_empty(request.tenant)

    def _wake_all(self) -> None:
        for tenant in (*self._lines,):
            self._wake(tenant)

    def _wake(self, tenant: str) -> None:
        """Place the requests at the head of a line, as far as they can be."""
        line = self._lines.get(tenant)
        while line:
            waiter = line.first()
            try:
                name = self._route(waiter.request)
            except NotPlacedError as error:
                line.remove(waiter)
                if not waiter.placed.done():
                    waiter.placed.set_exception(error)
                continue
            if name is None:
                break
            line.remove(waiter)
            if not waiter.placed.done():  # else its task was cancelled, and ends it
                waiter.placed.set_result(name)
        self._drop_empty(tenant)

    def _drop_empty(self, tenant: str) -> None:
        if not self._lines.get(tenant, True):
            del self._lines[tenant]
