"""The requests of a tenant that wait for its share of the replicas."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from attrs import define, field, frozen

from minfer.routing.messages import RoutingRequest

Item = TypeVar("Item")


@frozen(eq=False)
class Waiting(Generic[Item]):
    """A request that waits, and what its owner keeps of it."""

    item: Item
    request: RoutingRequest
    user: str = ""  # within the tenant


@define(eq=False)
class TenantQueue(Generic[Item]):
    """Waiting requests: users take turns, and those of one user are in order."""

    _users: OrderedDict[str, deque[Waiting[Item]]] = field(
        factory=OrderedDict, init=False
    )

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._users)

    def add(self, waiting: Waiting[Item]) -> None:
        """Add a request as the last one of its user."""
        self._users.setdefault(waiting.user, deque()).append(waiting)

    def first(self) -> Waiting[Item]:
        """Returns the request whose turn it is."""
        return next(iter(self._users.values()))[0]

    def remove(self, waiting: Waiting[Item]) -> None:
        """Remove a request, which waits. If it was the first, its user's next turn comes
        after all other users'.
        """
        queue = self._users[waiting.user]
        if waiting is self.first():
            self._users.move_to_end(waiting.user)
        queue.remove(waiting)
        if not queue:
            del self._users[waiting.user]
