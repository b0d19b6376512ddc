"""The dispatcher of a proxy: its callers wait for their backends in an event loop.

A request that is placed publishes the keys of its blocks for its backend at once
(`assumed_cache`), unless that backend reports what it caches.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from attrs import define

from minfer.blocks.keys import Keys
from minfer.effects.cluster.dispatch.dispatcher import (
    Assignment,
    Dispatcher,
    RecordedRouter,
    RoutingRecorder,
)
from minfer.effects.cluster.dispatch.tenant_queue import Waiting
from minfer.effects.proxy.assumed_cache import AssumedCache
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    Decision,
    Deferred,
    Placed,
    ReplicaJoined,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.state import Replica, RouterConfig, RouterState

NO_BACKEND: Final = "no server behind this router takes requests now"
# Why a request was sent to a backend without a decision of the router.
_HOME: Final = "home"  # no other backend can serve it
_MOVED: Final = "moved"  # the backend before failed


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


class BackendRouter(RecordedRouter):
    """The router among backends, each of which is assumed to cache `cache_blocks` blocks:
    the last that were sent there. Backends in `reporting` report their caches.
    """

    def __init__(
        self,
        config: RouterConfig,
        recorder: RoutingRecorder | None,
        cache_blocks: int,
        reporting: Mapping[str, Callable[[], Keys]],
    ) -> None:
        super().__init__(config, recorder)
        self.counts = RoutingCounts()
        self.caches: dict[str, AssumedCache] = {}
        self._cache_blocks = cache_blocks
        self._reporting = reporting

    def decide(self, request: RoutingRequest) -> Decision:
        """As in `RecordedRouter`; the blocks of the prompt count as cached there."""
        decision = super().decide(request)
        if isinstance(decision, Placed):
            self.counts.blocks += decision.blocks
            self.counts.hit_blocks += decision.hit
            self._use(decision.replica, request)
        return decision

    def dispatch(self, request: RoutingRequest, replica: str, why: str) -> Placed:
        """As in `RecordedRouter`; the blocks of the prompt count as cached there."""
        placed = super().dispatch(request, replica, why)
        self._use(replica, request)
        return placed

    def reported(self, name: str) -> tuple[RouterEvent, ...]:
        """The blocks that a backend reports as cached, as events."""
        keys = self._reporting[name]() if name in self._reporting else ()
        return (BlocksPublished(name, keys),) if keys else ()

    def _use(self, name: str, request: RoutingRequest) -> None:
        self.counts.placed += 1
        if name in self._reporting or not request.keys:
            return
        cache = self.caches.setdefault(name, AssumedCache(self._cache_blocks))
        use = cache.use(request.keys)
        events: list[RouterEvent] = []
        if use.published:
            events.append(BlocksPublished(name, use.published))
        if use.evicted:
            events.append(BlocksEvicted(name, use.evicted))
        if events:
            self.apply(*events)


class BackendDispatcher:
    """Places requests on backends; all methods run in one event loop.

    `cache_blocks`: how many blocks each backend is assumed to cache. Backends in
    `reporting` report their caches: all blocks when called, and changes by `report`. At
    most `max_waiting` requests are deferred at a time.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        cache_blocks: int,
        max_waiting: int,
        journal: RoutingRecorder | None = None,
        reporting: Mapping[str, Callable[[], Keys]] | None = None,
    ) -> None:
        self._router = BackendRouter(config, journal, cache_blocks, reporting or {})
        self._queues = Dispatcher[asyncio.Future[str]](self._router, _deliver, _refuse)
        self._max_waiting = max_waiting

    @property
    def state(self) -> RouterState:
        """The router's state."""
        return self._router.state

    @property
    def counts(self) -> RoutingCounts:
        """What was decided so far."""
        return self._router.counts

    @property
    def waiting(self) -> int:
        """How many requests are deferred."""
        return self._queues.waiting

    # --- backends -----------------------------------------------------------------------

    def available(self) -> list[Replica]:
        """The backends that take requests, by name."""
        replicas = (self.state.replicas[name] for name in self.state.names)
        return [replica for replica in replicas if not replica.draining]

    def join(self, name: str) -> None:
        """A backend takes requests."""
        replica = self.state.replicas.get(name)
        if replica is None:
            self._queues.join(name, *self._router.reported(name))
        elif replica.draining:
            self._queues.join(name)

    def drain(self, name: str) -> None:
        """A backend is well, and takes no more requests."""
        replica = self.state.replicas.get(name)
        if replica is None:
            events = (ReplicaJoined(name), *self._router.reported(name))
            self._queues.drain(name, *events)
        elif not replica.draining:
            self._queues.drain(name)

    def leave(self, name: str) -> None:
        """A backend is not there; its requests find out for themselves."""
        self._router.caches.pop(name, None)
        self._queues.leave(name)

    def report(self, name: str, *events: RouterEvent) -> None:
        """Apply a backend's events about its cache. They are ignored while it is not
        there: `join` reads all that is cached.
        """
        if name in self.state.replicas:
            self._router.apply(*events)

    def assumed_blocks(self, name: str) -> int:
        """Blocks that a backend is assumed to cache."""
        cache = self._router.caches.get(name)
        return 0 if cache is None else len(cache)

    # --- requests -----------------------------------------------------------------------

    async def place(self, request: RoutingRequest, user: str = "") -> str:
        """Returns the backend of a request of a tenant's `user`, once there is one. The
        caller must call `end`, even after an error. Raises NotPlacedError.
        """
        placed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._queues.submit([Waiting(placed, request, user)])
        if placed.done():
            return placed.result()
        try:
            if self.waiting > self._max_waiting:
                num_waiting = self.waiting - 1
                message = f"{num_waiting} requests wait, more than --max-waiting allows"
                raise TooManyWaitingError(message)
            self.counts.deferred += 1
            return await placed
        finally:
            self._queues.remove(request.id)  # the client may have left

    def send_to(self, name: str, request: RoutingRequest) -> None:
        """Count a request at a certain backend."""
        self._router.dispatch(request, name, _HOME)

    def move(self, request: RoutingRequest, tried: Collection[str]) -> str | None:
        """Move a request that could not be served: by the policy, if its backend has
        left, or else to one with the fewest requests; None if all were tried.
        """
        if request.id not in self.state.requests and self.available():
            decision = self._router.decide(request)
            if not isinstance(decision, Placed | Deferred):
                raise NotPlacedError(NO_BACKEND)
            if isinstance(decision, Placed) and decision.replica not in tried:
                return decision.replica
        candidates = [
            replica
            for replica in self.available()
            if replica.name not in tried
            and (request.allowed is None or replica.name in request.allowed)
        ]
        if not candidates:
            return None
        name = min(
            candidates, key=lambda replica: (replica.requests, replica.backlog)
        ).name
        self._router.dispatch(request, name, _MOVED)
        return name

    def start(self, request: str) -> None:
        """The answer of a request has begun."""
        self._queues.settle(RequestStarted(request))

    def end(self, request: str) -> None:
        """A request has ended, or was given up."""
        self._queues.settle(RequestEnded(request))


def _deliver(assigned: Sequence[Assignment[asyncio.Future[str]]]) -> None:
    for assignment in assigned:
        if not assignment.item.done():  # else its task was cancelled, and ends it
            assignment.item.set_result(assignment.placed.replica)


def _refuse(placed: asyncio.Future[str]) -> None:
    if not placed.done():
        placed.set_exception(NotPlacedError(NO_BACKEND))
