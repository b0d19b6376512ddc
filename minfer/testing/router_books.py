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
        found: dict[str, int] = {}
        for one in self.live.values():
            if not one.started:
                found[one.tenant] = found.get(one.tenant, 0) + one.prefill
        return found


@define
class RouterBooks:
    """All replicas by name."""

    block_size: int
    replicas: dict[str, ReplicaAccount] = field(factory=dict)
    seen: set[Key] = field(factory=set)  # all keys that were ever published

    @property
    def open(self) -> list[str]:
        """The names of the replicas that take requests."""
        return sorted(name for name, one in self.replicas.items() if not one.draining)

    @property
    def live(self) -> list[str]:
        """The ids of all requests that have not ended."""
        return sorted(name for one in self.replicas.values() for name in one.live)

    def take(self, event: RouterEvent) -> None:
        """Take an event."""
        match event:
            case ReplicaJoined(name):
                self.replicas.setdefault(name, ReplicaAccount()).draining = False
            case ReplicaLeft(name):
                self.replicas.pop(name, None)
            case RequestEnded(name):
                for one in self.replicas.values():
                    one.live.pop(name, None)
            case RequestStarted(name):
                for one in self.replicas.values():
                    if name in one.live:
                        one.live[name].started = True
            case _ if event.replica in self.replicas:
                self._take(self.replicas[event.replica], event)

    def _take(self, one: ReplicaAccount, event: RouterEvent) -> None:
        match event:
            case ReplicaDraining():
                one.draining = True
            case CacheCleared():
                one.keys.clear()
            case BlocksPublished(keys=keys):
                one.keys |= set(keys)
                self.seen |= set(keys)
            case BlocksEvicted(keys=keys):
                one.keys -= set(keys)
            case Dispatched(name, request):
                self.dispatch(name, request)
            case LoadReport():
                one.sequences = event.waiting + event.running
                one.prefill = event.prefill
                for each in one.live.values():
                    each.reported = True

    def dispatch(self, name: str, request: RoutingRequest) -> None:
        """Add a request to a replica, from wherever it was."""
        self.take(RequestEnded(request.id))
        one = self.replicas[name]
        prefill = prefill_tokens(request.tokens, one.hit(request), self.block_size)
        one.live[request.id] = DispatchAccount(request.tenant, prefill)

    def differences(self, state: RouterState) -> list[tuple[str, str]]:
        """How a state differs from the books: laws, and what is not so."""
        found = []
        names = sorted(self.replicas)
        if not names == [*state.names] == sorted(state.replicas):
            found.append(("replicas", f"{state.names}, and should be {names}"))
            return found
        where = {one: name for name in names for one in self.replicas[name].live}
        if dict(state.requests) != where:
            found.append(("accounts", f"{dict(state.requests)} are live, not {where}"))
        for name in names:
            found += self._replica(self.replicas[name], state.replicas[name])
        return found + self._index(state)

    def _replica(self, own: ReplicaAccount, one: Replica) -> list[tuple[str, str]]:
        new = [each for each in own.live.values() if not each.reported]
        waiting = own.waiting()
        pairs = {
            "draining": (one.draining, own.draining),
            "live": (sorted(one.live), sorted(own.live)),
            "requests": (one.requests, own.sequences + len(new)),
            "backlog": (
                one.backlog,
                own.prefill + sum(each.prefill for each in new if not each.started),
            ),
            "waiting": (dict(one.waiting), waiting),
            "waiting_tokens": (one.waiting_tokens, sum(waiting.values())),
        }
        return [
            ("accounts", f"{what} of {one.name!r} is {found}, not {right}")
            for what, (found, right) in pairs.items()
            if found != right
        ]

    def _index(self, state: RouterState) -> list[tuple[str, str]]:
        """Every key has the replicas that published and did not evict it; and the index
        keeps no others, but for those of replicas that left until they are swept out.
        """
        found = []
        for key in sorted(self.seen):
            slots = holders(state.index, key)
            has = sorted(n for n in state.names if state.replicas[n].slot & slots)
            right = sorted(name for name, one in self.replicas.items() if key in one.keys)
            if has != right:
                found.append(("index", f"{key.hex()} is at {has}, not at {right}"))
        gone = state.index.leaving | state.index.left
        for shard in state.index.shards.values():
            for key, slots in shard.items():
                if not slots & (gone | holders(state.index, key)):
                    found.append(("index", f"{key.hex()} is kept for no replica"))
        return found
