"""File descriptors: each connection takes one, and their number is limited.

Theory. The system gives a new descriptor the lowest free number, so the number of a
connection shows how many are left: all below it are taken. Numbers from the top down:

    RESERVED_DESCRIPTORS    for all else that the process opens; a connection is refused
                            at once
    SPARE_DESCRIPTORS       for connections beyond the limit: each may request /health,
                            and is closed when the next one comes (`connections`)
    others                  for connections, up to --max-connections

asyncio accepts all connections that wait, thousands of them, before it closes any. So a
`BoundedListener` accepts one in each round of the event loop once --max-connections are
open.

asyncio retries a failed accept again and again, with a traceback each time, and no client
gets an answer. So a `BoundedListener` keeps a spare descriptor: it closes that, accepts
with it, and refuses.
"""

import contextlib
import logging
import os
import resource
import socket
import sys
from collections import OrderedDict
from errno import EMFILE, ENFILE
from typing import Any, Final

RESERVED_DESCRIPTORS: Final = 16
SPARE_DESCRIPTORS: Final = 32
UNAVAILABLE_RESPONSE: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_log: Final = logging.getLogger("minfer.connections")
# Limits for which it was logged that they are reached.
_logged_limits: Final[set[int]] = set()
# Connections with spare descriptors that stay open at once.
MAX_SPARE_CONNECTIONS: Final = 8
# With TLS: connections of this process in their handshake, by descriptor. The oldest is
# first.
_handshakes: Final[OrderedDict[int, socket.socket]] = OrderedDict()


def raise_limit() -> None:
    """Raise the limit of this process, and of those it starts, as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # where "any number" is none
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def is_high(descriptor: int, last: int) -> bool:
    """Whether a connection's descriptor is among the `last`; the first is logged."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    high = limit != resource.RLIM_INFINITY and descriptor >= limit - last
    if high and limit not in _logged_limits:
        _logged_limits.add(limit)
        reason = f"file descriptors run short (ulimit -n is {limit}), and connections are"
        _log.warning("%s refused; raise it, or lower --max-connections", reason)
    return high


def note_handshake_done(descriptor: int) -> None:
    """Note that a connection's handshake is over."""
    _handshakes.pop(descriptor, None)


class BoundedListener(socket.socket):
    """A socket that listens, and never uses the last descriptors for connections.

    asyncio accepts all waiting connections before it handles any. So beyond the limit of
    connections, or when descriptors run short, one is accepted in each of its rounds, so
    that others can be closed in between.
    """

    tls = False  # whether connections begin with a handshake
    _first_extra = sys.maxsize  # the lowest descriptor of a connection beyond the limit
    _spare = -1  # a descriptor to give up
    _pausing = False  # until the next round

    @classmethod
    def of(cls, listening: socket.socket) -> "BoundedListener":
        """A listener in place of a listening socket."""
        listener = cls(fileno=listening.detach())
        listener._spare = os.open(os.devnull, os.O_RDONLY)
        return listener

    def limit_connections(self, count: int) -> None:
        """From now on, accept connections beyond `count` one in each round."""
        free = os.open(os.devnull, os.O_RDONLY)  # the lowest number
        os.close(free)
        self._first_extra = free + count

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError for one that is refused, and
        BlockingIOError if there is none in this round.
        """
        if self._pausing:
            self._pausing = False
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno not in (EMFILE, ENFILE):
                raise
            self._refuse_with_spare()
            raise ConnectionAbortedError from None
        if is_high(connection.fileno(), RESERVED_DESCRIPTORS):
            self._refuse(connection)
            raise ConnectionAbortedError
        beyond = connection.fileno() >= self._first_extra
        self._pausing = (
            is_high(connection.fileno(), RESERVED_DESCRIPTORS + SPARE_DESCRIPTORS)
            or beyond
        )
        if self._pausing and self.tls:
            _await_handshake(connection)
        return connection, address

    def close(self) -> None:
        """Close the socket and the spare descriptor."""
        super().close()
        with contextlib.suppress(OSError):
            os.close(self._spare)
        self._spare = -1

    def _refuse_with_spare(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._spare)
            connection, _ = super().accept()
            is_high(connection.fileno(), sys.maxsize)  # which is logged
            self._refuse(connection)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if not self.tls:
                connection.send(UNAVAILABLE_RESPONSE)


def _await_handshake(connection: socket.socket) -> None:
    """Register a handshake with a spare descriptor; the oldest of too many is refused."""
    _handshakes.pop(connection.fileno(), None)  # that connection is closed
    _handshakes[connection.fileno()] = connection
    if len(_handshakes) > MAX_SPARE_CONNECTIONS:
        _, oldest = _handshakes.popitem(last=False)
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)
