"""The engines that this one sends KV blocks to, or gets them from: a keyed store.

prefill engine                                  decode engine
want: a request's blocks are for that one
write: a block is computed ---- connection ---> inbox
                                                read: a request waits for it

A request says which engine its blocks are for: by a name that the plan has an address of,
or, if that engine is on another machine, by its address. Of an engine of several ranks,
each sends and receives its own slices of a block (head_slices.py).

A state of recurrent layers may be as large as 50 blocks. It is sent in parts that are as
large as blocks, as slots of the inbox are, each under a key of its own.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from attrs import define, field

from minfer.blocks.keys import Key, Keys, group_keys
from minfer.effects.execution.tiers.head_slices import WHOLE_BLOCK, HeadSlices, holders
from minfer.effects.execution.tiers.keyed_store import Contents
from minfer.effects.execution.tiers.peers.block_receiver import BlockReceiver
from minfer.effects.execution.tiers.peers.inbox import Inbox
from minfer.effects.execution.tiers.peers.peer_plan import PeerPlan, of_rank
from minfer.effects.execution.tiers.peers.remote_memory import RemoteInbox, WriteError
from minfer.effects.execution.tiers.peers.sender import Sender
from minfer.effects.net.addresses import listen_at, read_port
from minfer.effects.net.framing import PeerError

_log = logging.getLogger("minfer.peers")
MAX_WANTED_KEYS: Final = 1 << 17  # keys that wait to be sent
# Where that is neither too few slots nor too many:
INBOX_BYTES: Final = 2 << 30
MIN_INBOX_SLOTS: Final = 16
MAX_INBOX_SLOTS: Final = 4096
PART_BYTES: Final = 4  # of the number of a part, behind the key of its block
# Seconds after the last failure to reach an engine that has no address in the plan, until
# it counts as gone: it has another address when it starts again.
GONE_SECONDS: Final = 60.0
# Names of counts: of blocks, bytes and seconds.
SENT, SENT_BYTES = "kv_sent_blocks", "kv_sent_bytes"
SENDING, UNSENT = "kv_send_seconds", "kv_unsent_blocks"
RECEIVED, RECEIVED_BYTES = "kv_received_blocks", "kv_received_bytes"
FETCHING, UNREAD = "kv_receive_seconds", "kv_unread_blocks"


@define(eq=False)
class Peers:
    """One engine's exchange of blocks. Methods may be called from any thread, `open`
    first.
    """

    plan: PeerPlan
    groups: int  # of layers, with keys of their own
    slices: HeadSlices = WHOLE_BLOCK
    rank: int = 0
    broadcast: Callable[[Keys, str], None] | None = None  # has other ranks want the same
    inbox: Inbox | None = field(init=False, default=None)
    _remote: RemoteInbox | None = field(init=False, default=None)
    _layout: bytes = field(init=False, default=b"")
    _slot_bytes: int = field(init=False, default=0)
    _wanted: OrderedDict[Key, frozenset[str]] = field(init=False, factory=OrderedDict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _senders: dict[tuple[str, int], Sender] = field(init=False, factory=dict)
    _dropped_counts: Counter[str] = field(
        init=False, factory=Counter
    )  # of senders dropped
    _listeners: list[BlockReceiver] = field(init=False, factory=list)
    _seconds: dict[bool, float] = field(init=False)  # of fetches, or of stores

    def __attrs_post_init__(self) -> None:
        self._seconds = {False: 0.0, True: 0.0}

    def open(self, layout: bytes, block_bytes: int) -> None:
        """As `KeyedStore` says. Raises OSError if it cannot listen, or there is no
        memory.
        """
        plan, self._layout, self._slot_bytes = self.plan, layout, block_bytes
        self._senders = {
            (name, rank): Sender(of_rank(address, rank), layout, plan.secret, plan.name)
            for name, address in plan.sends.items()
            for rank in range(plan.decode_ranks)
        }
        if plan.listens or plan.sock is not None:
            slots = max(MIN_INBOX_SLOTS, min(INBOX_BYTES // block_bytes, MAX_INBOX_SLOTS))
            inbox = self.inbox = Inbox(slots, block_bytes)
            if plan.nixl:
                try:
                    self._remote = RemoteInbox(inbox.memory)
                except WriteError as error:
                    _log.warning("KV blocks come over TCP alone: %s", error)
            remote = None if self._remote is None else self._remote.remote
            socks = [listen_at(of_rank(address, self.rank)) for address in plan.listens]
            if plan.sock is not None:
                socks.append(plan.sock)
            for sock in socks:
                receiver = BlockReceiver(inbox, layout, plan.secret, sock, remote)
                receiver.start()
                self._listeners.append(receiver)

    def check_stores(self) -> None:
        """As `KeyedStore` says: never raises, as each receiver is tried by itself."""

    def leading(self, keys: Keys) -> int:
        """As `KeyedStore` says: a request says what was sent for it."""
        del keys
        return 0

    def want(self, keys: Keys, engine: str) -> None:
        """As `KeyedStore` says."""
        if self.broadcast is not None:
            self.broadcast(keys, engine)
        with self._lock:
            for name in self._names(keys):
                self._wanted[name] = self._wanted.get(name, frozenset()) | {engine}
                self._wanted.move_to_end(name)
            while len(self._wanted) > MAX_WANTED_KEYS:
                self._wanted.popitem(last=False)

    def _names(self, keys: Keys) -> Iterator[Key]:
        """Yields the keys of the slices of blocks that this rank sends."""
        for group in range(self.groups):
            for key in group_keys(keys, group):
                for number in self.slices.sent:
                    yield self.slices.key(key, number)

    def write(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Send a block to all engines that want it. Its sender counts one that cannot be
        reached, which is no error: the transfer has blocks for other engines, too, and
        would end with it. Raises PeerError for an engine that is not known.
        """
        del layout
        with self._lock:
            engines = self._wanted.pop(key, frozenset())
        number, ranks = self.slices.number(key), self.plan.decode_ranks
        for engine in sorted(engines):
            for rank in holders(number, self.slices.count, ranks):
                sender = self._sender(engine, rank)
                with suppress(PeerError):  # it has counted and logged that
                    for part_key, part in self._parts(key, contents):
                        sender.send(part_key, part)

    def _sender(self, engine: str, rank: int) -> Sender:
        """Returns what sends to a rank of an engine. Raises PeerError."""
        with self._lock:
            if (sender := self._senders.get((engine, rank))) is not None:
                return sender
            plan = self.plan
            if not plan.dials:
                raise PeerError(f"there is no engine {engine!r} to send blocks to")
            try:
                address = read_port(engine)
            except ValueError as error:
                raise PeerError(f"blocks cannot be sent: {error}") from None
            gone_senders = self._drop_gone()
            sender = Sender(address, self._layout, plan.secret, plan.name)
            self._senders[engine, rank] = sender
        for dropped in gone_senders:
            dropped.close()
        return sender

    def _drop_gone(self) -> list[Sender]:
        """Drop the senders to engines that are gone; returns them."""
        gone_senders = {
            engine_rank: sender
            for engine_rank, sender in self._senders.items()
            if engine_rank[0] not in self.plan.sends
            and sender.has_been_broken(GONE_SECONDS)
        }
        for engine_rank in gone_senders:
            del self._senders[engine_rank]
        self._dropped_counts += _counts(gone_senders.values())
        return [*gone_senders.values()]

    def read(self, key: Key, layout: bytes, contents: Contents) -> None:
        """Get a block that another engine sends; waits for it. Raises PeerError."""
        del layout
        if self.inbox is None:
            raise PeerError("this engine gets no blocks from others")
        for part_key, part in self._parts(key, contents):
            self.inbox.fetch(part_key, part)

    def _parts(self, key: Key, contents: Contents) -> Iterator[tuple[Key, Contents]]:
        """Yields the parts of a block, each with its key: one, but of a large state."""
        if sum(map(len, contents)) <= self._slot_bytes:
            yield key, contents
            return
        for number, part in enumerate(_cut(contents, self._slot_bytes)):
            yield key + number.to_bytes(PART_BYTES), part

    def note(self, *, fetches: bool, seconds: float, dropped: int = 0) -> None:
        """As `KeyedStore` says; senders count what they could not send."""
        del dropped
        with self._lock:
            self._seconds[fetches] += seconds

    def totals(self) -> dict[str, float]:
        """As `KeyedStore` says."""
        with self._lock:
            box = self.inbox
            sent = self._dropped_counts + _counts(self._senders.values())
        return {
            SENT: sent[SENT],
            SENT_BYTES: sent[SENT_BYTES],
            SENDING: self._seconds[False],
            UNSENT: sent[UNSENT],
            RECEIVED: box.received if box else 0,
            RECEIVED_BYTES: box.received_bytes if box else 0,
            FETCHING: self._seconds[True],
            UNREAD: box.evicted if box else 0,
        }

    def close(self) -> None:
        """Close all connections."""
        for sender in [*self._senders.values()]:
            sender.close()
        for listener in self._listeners:
            listener.close()
        if self._remote is not None:
            self._remote.close()
        if self.inbox is not None:
            self.inbox.close()


def _cut(contents: Contents, size: int) -> Iterator[list[memoryview]]:
    """Yields the contents in parts of `size` bytes; the last one may be shorter."""
    part, room = list[memoryview](), size
    for chunk in contents:
        first = 0
        while first < len(chunk):
            piece = chunk[first : first + room]
            part.append(piece)
            first, room = first + len(piece), room - len(piece)
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def _counts(senders: Iterable[Sender]) -> Counter[str]:
    """Returns what senders have sent so far, and could not send."""
    counts = Counter[str]()
    for sender in senders:
        counts.update(
            {SENT: sender.sent, SENT_BYTES: sender.sent_bytes, UNSENT: sender.dropped}
        )
    return counts
