"""Routers for tests: replicas by name, and requests whose blocks are numbers."""

from typing import Any

from minfer.blocks.keys import Keys, block_keys
from minfer.routing.messages import ReplicaJoined, RouterEvent, RoutingRequest
from minfer.routing.policies import LeastLoaded
from minfer.routing.router import Routed, apply, initial_router, route
from minfer.routing.state import Replica, RouterConfig, RouterState

SIZE = 10  # tokens of a block


def keys(*blocks: int) -> Keys:
    return block_keys(b"", blocks, 1)


def ask(name: str = "r", *blocks: int, rest: int = 5, **more: Any) -> RoutingRequest:
    """A request of some blocks, and `rest` tokens."""
    return RoutingRequest(name, keys(*blocks), SIZE * len(blocks) + rest, **more)


class Desk:
    """A router and its state."""

    def __init__(self, replicas: str = "abc", policy: Any = None) -> None:
        self.config = RouterConfig(policy or LeastLoaded(), SIZE)
        self.state: RouterState = initial_router(self.config)
        self.reasons: list[Any] = []
        self.tell(*map(ReplicaJoined, replicas))

    def tell(self, *events: RouterEvent) -> None:
        found = apply(self.config, self.state, events)
        self.state = found.state
        self.reasons = [*found.reasons]

    def route(self, request: RoutingRequest) -> Routed:
        found = route(self.config, self.state, request)
        self.state = found.state
        return found

    def placed(self, request: RoutingRequest) -> str | None:
        return self.route(request).replica

    def __getitem__(self, name: str) -> Replica:
        return self.state.replicas[name]
