"""The books of the router's specification: what replicas cache and which requests they
have, as plain sets and lists, apart from the router and far simpler.
"""

from attrs import define, field

from minfer.blocks.keys import Key
from minfer.routing.accounts import prefill_tokens
from minfer.routing.key_index import holders
from minfer.routing.messages import (
    BlocksEvicted,
    BlocksPublished,
    CacheCleared,
    Dispatched,
    LoadReport,
    ReplicaDraining,
    ReplicaJoined,
    ReplicaLeft,
    RequestEnded,
    RequestStarted,
    RouterEvent,
    RoutingRequest,
)
from minfer.routing.state import Replica, RouterState


@define
class DispatchAccount:
    """A request on a replica."""

    tenant: str
    prefill: int  # tokens
    started: bool = False
    reported: bool = False  # a load report came after it


@define
class ReplicaAccount:
    """A replica: its keys, its requests, and its last report."""

    draining: bool = False
    keys: set[Key] = field(factory=set)
    live: dict[str, DispatchAccount] = field(factory=dict)
    sequences: int = 0
    prefill: int = 0

    def hit(self, request: RoutingRequest) -> int:
        """How many leading blocks of a prompt are cached."""
        count = 0
        while count < len(request.keys) and request.keys[count] in self.keys:
            count += 1
        return count

    def waiting(self) -> dict[str, int]:
        """Prefill tokens of requests that have not started, by tenant."""
        waiting: dict[str, int] = {}
        for dispatched in self.live.values():
            if not dispatched.started:
                waiting[dispatched.tenant] = (
                    waiting.get(dispatched.tenant, 0) + dispatched.prefill
                )
        return waiting


@define
class RouterBooks:
    """All replicas by name."""

    block_size: int
    replicas: dict[str, ReplicaAccount] = field(factory=dict)
    seen: set[Key] = field(factory=set)  # all keys that were ever published

    @property
    def open(self) -> list[str]:
        """The names of the replicas that take requests."""
        return sorted(
            name for name, replica in self.replicas.items() if not replica.draining
        )

    @property
    def live(self) -> list[str]:
        """The ids of all requests that have not ended."""
        return sorted(name for replica in self.replicas.values() for name in replica.live)

    def take(self, event: RouterEvent) -> None:
        """Take an event."""
        match event:
            case ReplicaJoined(name):
                self.replicas.setdefault(name, ReplicaAccount()).draining = False
            case ReplicaLeft(name):
                self.replicas.pop(name, None)
            case RequestEnded(name):
                for replica in self.replicas.values():
                    replica.live.pop(name, None)
            case RequestStarted(name):
                for replica in self.replicas.values():
                    if name in replica.live:
                        replica.live[name].started = True
            case _ if event.replica in self.replicas:
                self._take(self.replicas[event.replica], event)

    def _take(self, replica: ReplicaAccount, event: RouterEvent) -> None:
        match event:
            case ReplicaDraining():
                replica.draining = True
            case CacheCleared():
                replica.keys.clear()
            case BlocksPublished(keys=keys):
                replica.keys |= set(keys)
                self.seen |= set(keys)
            case BlocksEvicted(keys=keys):
                replica.keys -= set(keys)
            case Dispatched(name, request):
                self.dispatch(name, request)
            case LoadReport():
                replica.sequences = event.waiting + event.running
                replica.prefill = event.prefill
                for dispatched in replica.live.values():
                    dispatched.reported = True

    def dispatch(self, name: str, request: RoutingRequest) -> None:
        """Add a request to a replica, from wherever it was."""
        self.take(RequestEnded(request.id))
        replica = self.replicas[name]
        prefill = prefill_tokens(request.tokens, replica.hit(request), self.block_size)
        replica.live[request.id] = DispatchAccount(request.tenant, prefill)

    def differences(self, state: RouterState) -> list[tuple[str, str]]:
        """How a state differs from the books: laws, and what is not so."""
        differences = []
        names = sorted(self.replicas)
        if not names == [*state.names] == sorted(state.replicas):
            differences.append(("replicas", f"{state.names}, and should be {names}"))
            return differences
        replica_of = {
            request_id: name for name in names for request_id in self.replicas[name].live
        }
        if dict(state.requests) != replica_of:
            differences.append(
                ("accounts", f"{dict(state.requests)} are live, not {replica_of}")
            )
        for name in names:
            differences += self._replica(self.replicas[name], state.replicas[name])
        return differences + self._index(state)

    def _replica(
        self, account: ReplicaAccount, replica: Replica
    ) -> list[tuple[str, str]]:
        unreported = [
            dispatched for dispatched in account.live.values() if not dispatched.reported
        ]
        waiting = account.waiting()
        pairs = {
            "draining": (replica.draining, account.draining),
            "live": (sorted(replica.live), sorted(account.live)),
            "requests": (replica.requests, account.sequences + len(unreported)),
            "backlog": (
                replica.backlog,
                account.prefill
                + sum(
                    dispatched.prefill
                    for dispatched in unreported
                    if not dispatched.started
                ),
            ),
            "waiting": (dict(replica.waiting), waiting),
            "waiting_tokens": (replica.waiting_tokens, sum(waiting.values())),
        }
        return [
            ("accounts", f"{name} of {replica.name!r} is {actual}, not {expected}")
            for name, (actual, expected) in pairs.items()
            if actual != expected
        ]

    def _index(self, state: RouterState) -> list[tuple[str, str]]:
        """Every key has the replicas that published and did not evict it; and the index
        keeps no others, but for those of replicas that left until they are swept out.
        """
        differences = []
        for key in sorted(self.seen):
            slots = holders(state.index, key)
            actual = sorted(n for n in state.names if state.replicas[n].slot & slots)
            expected = sorted(
                name for name, replica in self.replicas.items() if key in replica.keys
            )
            if actual != expected:
                differences.append(
                    ("index", f"{key.hex()} is at {actual}, not at {expected}")
                )
        left = state.index.leaving | state.index.left
        for shard in state.index.shards.values():
            for key, slots in shard.items():
                if not slots & (left | holders(state.index, key)):
                    differences.append(("index", f"{key.hex()} is kept for no replica"))
        return differences
