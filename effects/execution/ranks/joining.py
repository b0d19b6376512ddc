"""How other ranks join rank 0: each connects to its socket, proves that it has the key,
and says which rank it is. A stranger that connects and is silent holds up no other one.
"""

import contextlib
import json
import struct
import threading
from collections.abc import Mapping
from multiprocessing import ProcessError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from socket import (
    IPPROTO_TCP,
    SO_RCVTIMEO,
    SOL_SOCKET,
    TCP_NODELAY,
    create_server,
    socket,
)
from typing import Any, Final

from attrs import define, field, frozen

from minfer.effects.execution.ranks.rank_store import HERE

SILENCE: Final = 10.0  # seconds without a word, after which a rank hangs
POLL: Final = 0.05  # seconds


@frozen(eq=False)
class Joined:
    """A rank that has proven that it is one."""

    link: Connection
    message: Mapping[str, Any]  # the first one


@define(eq=False)
class Door:
    """Rank 0's socket."""

    key: bytes
    _socket: socket = field(init=False)
    _joined: SimpleQueue[Joined] = field(factory=SimpleQueue, init=False)

    def __attrs_post_init__(self) -> None:
        self._socket = create_server((HERE, 0))
        self._socket.settimeout(POLL)

    @property
    def address(self) -> tuple[str, int]:
        """Where ranks connect: host and port."""
        host, port = self._socket.getsockname()
        return host, port

    def joined(self) -> list[Joined]:
        """Those that have joined since the last call; waits `POLL` seconds for more."""
        with contextlib.suppress(TimeoutError):
            made, _ = self._socket.accept()
            # Of each read, here and later: in the middle of a message no one may hang.
            limit = struct.pack("ll", int(SILENCE), 0)
            made.setsockopt(SOL_SOCKET, SO_RCVTIMEO, limit)
            # Else an item may wait 40 ms for the receipt of the one before.
            made.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            link = Connection(made.detach())
            threading.Thread(
                target=self._greet, args=(link,), name="minfer-joining", daemon=True
            ).start()
        return [self._joined.get() for _ in range(self._joined.qsize())]

    def _greet(self, link: Connection) -> None:
        try:
            deliver_challenge(link, self.key)
            answer_challenge(link, self.key)
            self._joined.put(Joined(link, json.loads(link.recv_bytes())))
        except (OSError, EOFError, ProcessError):
            link.close()  # it is no rank

    def close(self) -> None:
        """Take no more connections."""
        self._socket.close()
