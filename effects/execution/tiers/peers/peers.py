"""The engines that this one sends KV blocks to, or gets them from."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import define, field

from minfer.blocks.keys import Key, Keys, group_keys
from minfer.effects.execution.tiers.peers.inbox import Inbox
from minfer.effects.execution.tiers.peers.listener import Listener
from minfer.effects.execution.tiers.peers.peer_messages import PeerError, Socket
from minfer.effects.execution.tiers.peers.sender import Address, Sender

MOST_WANTED: Final = 1 << 17  # keys that wait to be sent


@define(eq=False)
class Peers:
    """One engine's exchange of blocks. Methods may be called from any thread.

    `wanted` is told of a request's blocks when it is submitted; they are sent when they
    have been computed. What others send is in the inbox until it is fetched.
    """

    name: str  # of this engine
    layout: bytes  # of pages: a digest
    secret: bytes
    groups: int  # of layers, with keys of their own
    addresses: dict[str, Address]  # of those that it may send to, by name
    inbox: Inbox | None = None
    sockets: Sequence[Socket] = ()  # on which others may connect
    _wanted: OrderedDict[Key, frozenset[str]] = field(init=False, factory=OrderedDict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _senders: dict[str, Sender] = field(init=False)
    _listeners: list[Listener] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        self._senders = {
            name: Sender(address, self.layout, self.secret, self.name)
            for name, address in self.addresses.items()
        }
        if self.inbox is not None:
            for sock in self.sockets:
                one = Listener(self.inbox, self.layout, self.secret, sock)
                one.start()
                self._listeners.append(one)

    def want(self, keys: Keys, peer: str) -> None:
        """Have the blocks of a request sent to a peer, once they are computed."""
        with self._lock:
            for group in range(self.groups):
                for key in group_keys(keys, group):
                    self._wanted[key] = self._wanted.get(key, frozenset()) | {peer}
                    self._wanted.move_to_end(key)
            while len(self._wanted) > MOST_WANTED:
                self._wanted.popitem(last=False)

    def send(self, key: Key, contents: Sequence[memoryview]) -> bool:
        """Send a block to all that want it; returns whether there was one. Raises
        PeerError.
        """
        with self._lock:
            peers = self._wanted.pop(key, frozenset())
        for peer in sorted(peers):
            if (sender := self._senders.get(peer)) is None:
                raise PeerError(f"there is no engine {peer!r} to send blocks to")
            sender.send(key, contents)
        return bool(peers)

    @property
    def senders(self) -> Iterable[Sender]:
        """One for each peer, with what was sent to it."""
        return self._senders.values()

    def close(self) -> None:
        """Close all connections."""
        for sender in self._senders.values():
            sender.close()
        for listener in self._listeners:
            listener.close()
        if self.inbox is not None:
            self.inbox.close()
