"""The router's state: one frozen value.

The load of a replica is what it reported last, and the requests that were dispatched to
it since then. So a replica that never reports is judged by dispatched minus ended, and
one that reports often by what it says.
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
    block_size: int = field(default=64, validator=number(1, of="router: "))  # tokens


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
    # As reported last: sequences, prefill tokens to come, free pages.
    sequences: int = 0
    prefill: int = 0
    pages: int | None = None
    reports: int = 0
    # Of the requests that were dispatched since then: those that have not ended, and the
    # prefill tokens of those that have not started.
    new_sequences: int = 0
    new_prefill: int = 0
    # All requests that were dispatched and have not ended.
    live: Map[str, Dispatch] = Map()
    # Prefill tokens of those that have not started, by tenant and of all.
    waiting: Map[str, int] = Map()
    waiting_tokens: int = 0

    @property
    def requests(self) -> int:
        """Sequences that wait or run."""
        return self.sequences + self.new_sequences

    @property
    def backlog(self) -> int:
        """Tokens whose prefill is still to come."""
        return self.prefill + self.new_prefill


@frozen(slots=False)  # changed often
class RouterState:
    """All that decisions depend on: equal states lead to equal decisions."""

    policy: Any  # the policy's own state
    index: KeyIndex = KeyIndex()
    replicas: Map[str, Replica] = Map()
    names: tuple[str, ...] = ()  # of the replicas, sorted
    requests: Map[str, str] = Map()  # id -> replica
