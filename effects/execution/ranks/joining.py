"""How other ranks join rank 0: each connects to its socket, both prove that they have the
engine's key (tiers/peers/handshake.py), and the rank says which version of minfer and
which weights it has.
"""

import json
import struct
from collections.abc import Mapping
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from socket import SO_RCVTIMEO, SOL_SOCKET
from typing import Any, Final

from attrs import define, field, frozen

from minfer.effects.execution.ranks.rank_store import HERE
from minfer.effects.execution.tiers.peers.addresses import Port, listen_at
from minfer.effects.execution.tiers.peers.door import Door, connect
from minfer.effects.execution.tiers.peers.framing import Socket
from minfer.effects.execution.tiers.peers.handshake import Terms

SILENCE: Final = 10.0  # seconds without a word, after which a rank hangs
POLL: Final = 0.05  # seconds


@frozen(eq=False)
class Joined:
    """A rank that has proven that it is one."""

    rank: int
    link: Connection
    message: Mapping[str, Any]  # the first one


@define(eq=False)
class RankListener:
    """Rank 0's listening socket, and the ranks that have joined there."""

    key: bytes
    address: Port = field(init=False)  # where ranks connect
    _door: Door = field(init=False)
    _joined: SimpleQueue[Joined] = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        sock = listen_at((HERE, 0))
        self.address = sock.getsockname()
        self._door = Door(sock, _terms(self.key), self._enter, "a rank")
        self._door.start()

    def joined(self) -> Joined | None:
        """Returns the next rank that has joined; None if there is none for `POLL`
        seconds.
        """
        try:
            return self._joined.get(timeout=POLL)
        except Empty:
            return None

    def _enter(self, sock: Socket, name: str) -> None:
        # For each read, here and later: the reader must not wait for ever for the rest of
        # a message.
        limit = struct.pack("ll", int(SILENCE), 0)
        sock.setsockopt(SOL_SOCKET, SO_RCVTIMEO, limit)
        link = Connection(sock.detach())
        try:
            message = json.loads(link.recv_bytes())
        except (OSError, EOFError):
            link.close()  # it has ended, or hangs
        else:
            self._joined.put(Joined(int(name), link, message))

    def close(self) -> None:
        """Accept no more connections."""
        self._door.close()


def join(address: Port, key: bytes, rank: int) -> Connection:
    """Connect to rank 0. Raises PeerError and OSError."""
    return Connection(connect(address, _terms(key), str(rank)).detach())


def _terms(key: bytes) -> Terms:
    """What ranks and rank 0 have in common; versions and weights are compared later, as
    rank 0 ends with an error if they differ.
    """
    return Terms(purpose="rank", version="1", layout=b"", secret=key)
