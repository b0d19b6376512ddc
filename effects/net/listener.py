"""Connections between processes that prove to each other that they know the secret: a
`Listener` accepts them, `connect` makes one.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from attrs import define, field

from minfer.effects.net.addresses import (
    Address,
    check_user,
    dial,
    enable_keepalive,
)
from minfer.effects.net.framing import PeerError, Socket
from minfer.effects.net.handshake import (
    RefusedError,
    Terms,
    accept_handshake,
    initiate_handshake,
)

MAX_UNAUTHENTICATED: Final = 64  # connections in the handshake at a time
REPEATED_LOG_SECONDS: Final = 60.0  # seconds after which the same refusal is logged again
_ERROR_PAUSE_SECONDS: Final = 0.1  # seconds after an error of the system
_JOIN_SECONDS: Final = 1.0  # seconds that the thread which accepts has to end in
_log = logging.getLogger("minfer.net")


@define(eq=False)
class Listener:
    """Performs the handshake of each new connection in a thread of its own, which calls
    `on_connected` if the other side has proven that it knows the secret. At a local
    socket, it must also be a process of the same user. Of more than
    `MAX_UNAUTHENTICATED` connections, the oldest is closed, so that none of them keeps
    others out.
    """

    sock: Socket  # that listens
    terms: Terms
    # Gets a connection, and the other side's name.
    on_connected: Callable[[Socket, str], None]
    peer_kind: str  # what kind of process connects here, for logs
    _unauthenticated: dict[int, Socket] = field(init=False, factory=dict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _closing: threading.Event = field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = field(init=False, default=None)
    # The last warning, and when it was logged.
    _last_log: tuple[str, float] = field(init=False, default=("", 0.0))

    def start(self) -> None:
        """Accept connections from now on."""
        self.sock.listen()  # again, where an earlier process of the same socket closed it
        name = f"minfer-{self.terms.purpose}-listener"
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; authenticated connections stay open."""
        self._closing.set()
        with self._lock:
            sockets = [self.sock, *self._unauthenticated.values()]
        for sock in sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Where a later listener of the same socket is there before the thread has woken,
        # the thread would go on, and close a connection that is for that one.
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
        self.sock.close()

    def _accept(self) -> None:
        number = 0
        while not self._closing.is_set():
            try:
                connection, address = self.sock.accept()
            except OSError as error:  # as when there are no descriptors
                if not self._closing.is_set():
                    _log.warning("%s cannot be let in now: %s", self.peer_kind, error)
                    time.sleep(_ERROR_PAUSE_SECONDS)
                continue
            number += 1
            with self._lock:
                if (
                    self._closing.is_set()
                ):  # it came just before `close`, which does not know it
                    connection.close()
                    return
                self._unauthenticated[number] = connection
                if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                    oldest = self._unauthenticated.pop(min(self._unauthenticated))
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            thread = threading.Thread(
                target=self._authenticate,
                args=(number, connection, f" at {address[0]}" if address else ""),
                name=f"minfer-{self.terms.purpose}-peer",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                _log.warning("%s cannot be let in now: %s", self.peer_kind, error)
                with self._lock:
                    self._unauthenticated.pop(number, None)
                connection.close()

    def _authenticate(self, number: int, sock: Socket, peer_address: str) -> None:
        try:
            if sock.family == socket.AF_UNIX:
                check_user(sock)
            else:
                enable_keepalive(sock)
            name = accept_handshake(sock, self.terms)
        except (PeerError, OSError) as error:
            self._report(peer_address, error)
            sock.close()
            return
        finally:
            with self._lock:
                self._unauthenticated.pop(number, None)
        self.on_connected(sock, name)

    def _report(self, peer_address: str, error: Exception) -> None:
        """Log a refusal, but the same one not again and again."""
        line, now = (
            f"{self.peer_kind}{peer_address} is refused: {error}",
            time.monotonic(),
        )
        if not isinstance(error, RefusedError):  # a probe, a scan, or it went away
            _log.info("%s", line)
        elif self._last_log[0] != line or now > self._last_log[1] + REPEATED_LOG_SECONDS:
            self._last_log = line, now
            _log.warning("%s", line)


def connect(address: Address, terms: Terms, name: str) -> Socket:
    """Returns a connection to a process that has proven the secret, and knows this one by
    its name. Raises PeerError and OSError.
    """
    sock = dial(address)
    try:
        initiate_handshake(sock, terms, name)
    except BaseException:
        sock.close()
        raise
    return sock
