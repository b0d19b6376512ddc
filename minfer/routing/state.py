"""The router's state: one frozen value.

The load of a replica (`requests`, `backlog`) is what it reported last, and the requests
that were dispatched to it since then, as far as they have not ended or started. So a
replica that never reports is judged by dispatched minus ended, and one that reports often
by what it says.
"""

from typing import Any

from attrs import field, frozen

from minfer.routing.key_index import KeyIndex, Slots
from minfer.values.checks import number
from minfer.values.pmap import Map


@frozen
class RouterConfig:
    """The settings of a router. Raises ConfigError."""

    policy: Any  # a RoutingPolicy
    block_size: int = field(default=64, validator=number(1, prefix="router: "))  # tokens


@frozen
class Dispatch:
    """A request on a replica."""

    tenant: str
    prefill: int  # tokens that were not in the cache
    report: int  # reports of the replica before it
    started: bool = False


@frozen(slots=False)  # changed often
class Replica:
    """A replica, and the accounts of its load."""

    name: str
    slot: Slots  # in the index
    draining: bool = False
    requests: int = 0  # sequences that wait or run
    backlog: int = 0  # tokens whose prefill is still to come
    pages: int | None = None  # that could be allocated at the last report, if it said so
    reports: int = 0  # of its load so far
    # The adapters that are believed to be on its device: those of its last report that
    # named any, and of requests that were dispatched since, the latest last.
    adapters: tuple[str, ...] = ()
    # All requests that were dispatched and have not ended.
    live: Map[str, Dispatch] = Map()
    # Prefill tokens of those that have not started, by tenant and of all.
    waiting: Map[str, int] = Map()
    waiting_tokens: int = 0


@frozen(slots=False)  # changed often
class RouterState:
    """All that decisions depend on: equal states lead to equal decisions."""

    policy: Any  # the policy's own state
    index: KeyIndex = KeyIndex()
    replicas: Map[str, Replica] = Map()
    names: tuple[str, ...] = ()  # of the replicas, sorted
    requests: Map[str, str] = Map()  # id -> replica
