"""The requests of a tenant that wait for its share of the backends."""

import asyncio
from collections import OrderedDict, deque

from attrs import define, field

from minfer.routing.messages import RoutingRequest


@define(eq=False)
class Waiter:
    """A request that waits, and the backend on which it is placed."""

    request: RoutingRequest
    user: str  # within the tenant
    placed: "asyncio.Future[str]"


@define(eq=False)
class TenantLine:
    """Waiting requests: users take turns, and those of one user are in order."""

    _users: OrderedDict[str, deque[Waiter]] = field(factory=OrderedDict, init=False)

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._users)

    def add(self, waiter: Waiter) -> None:
        """Add a request as the last one of its user."""
        self._users.setdefault(waiter.user, deque()).append(waiter)

    def first(self) -> Waiter:
        """The request whose turn it is."""
        return next(iter(self._users.values()))[0]

    def remove(self, waiter: Waiter) -> None:
        """Remove a request, if it waits. If it was the first, its user's next turn comes
        after all other users'.
        """
        queue = self._users.get(waiter.user)
        if queue is None or waiter not in queue:
            return
        if waiter is self.first():
            self._users.move_to_end(waiter.user)
        queue.remove(waiter)
        if not queue:
            del self._users[waiter.user]
