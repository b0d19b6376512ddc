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
    notice_cuts,
)
from minfer.effects.net.framing import PeerError, Socket
from minfer.effects.net.handshake import (
    RefusedError,
    Terms,
    answer,
    introduce,
)

MOST: Final = 64  # connections in the handshake at a time
AGAIN: Final = 60.0  # seconds after which the same refusal is logged again
_PAUSE: Final = 0.1  # seconds after an error of the system
_ENDING: Final = 1.0  # seconds that the thread which accepts has to end in
_log = logging.getLogger("minfer.net")


@define(eq=False)
class Listener:
    """Performs the handshake of each new connection in a thread of its own, which calls
    `enter` if the other side has proven that it knows the secret. At a local socket, it
    must also be a process of the same user. Of more than `MOST` connections that have not
    proven anything yet, the oldest is closed, so that none of them keeps others out.
    """

    sock: Socket  # that listens
    terms: Terms
    enter: Callable[[Socket, str], None]  # gets a connection, and the other side's name
    whom: str  # what kind of process connects here, for logs
    _strangers: dict[int, Socket] = field(init=False, factory=dict)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)
    _closing: threading.Event = field(init=False, factory=threading.Event)
    _thread: threading.Thread | None = field(init=False, default=None)
    _said: tuple[str, float] = field(init=False, default=("", 0.0))  # last log, and when

    def start(self) -> None:
        """Accept connections from now on."""
        self.sock.listen()  # again, where an earlier process of the same socket closed it
        name = f"minfer-{self.terms.purpose}-listener"
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more; those that were let in stay."""
        self._closing.set()
        with self._lock:
            each = [self.sock, *self._strangers.values()]
        for one in each:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        # Where a later listener of the same socket is there before the thread has woken,
        # the thread would go on, and close a connection that is for that one.
        if self._thread is not None:
            self._thread.join(_ENDING)
        self.sock.close()

    def _accept(self) -> None:
        number = 0
        while not self._closing.is_set():
            try:
                connection, address = self.sock.accept()
            except OSError as error:  # as when there are no descriptors
                if not self._closing.is_set():
                    _log.warning("%s cannot be let in now: %s", self.whom, error)
                    time.sleep(_PAUSE)
                continue
            number += 1
            with self._lock:
                if (
                    self._closing.is_set()
                ):  # it came just before `close`, which does not know it
                    connection.close()
                    return
                self._strangers[number] = connection
                if len(self._strangers) > MOST:
                    oldest = self._strangers.pop(min(self._strangers))
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
            greeting = threading.Thread(
                target=self._greet,
                args=(number, connection, f" at {address[0]}" if address else ""),
                name=f"minfer-{self.terms.purpose}-peer",
                daemon=True,
            )
            try:
                greeting.start()
            except RuntimeError as error:  # the system gives no more threads
                _log.warning("%s cannot be let in now: %s", self.whom, error)
                with self._lock:
                    self._strangers.pop(number, None)
                connection.close()

    def _greet(self, number: int, sock: Socket, where: str) -> None:
        try:
            if sock.family == socket.AF_UNIX:
                check_user(sock)
            else:
                notice_cuts(sock)
            name = answer(sock, self.terms)
        except (PeerError, OSError) as error:
            self._report(where, error)
            sock.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(number, None)
        self.enter(sock, name)

    def _report(self, where: str, error: Exception) -> None:
        """Log a refusal, but the same one not again and again."""
        what, now = f"{self.whom}{where} is refused: {error}", time.monotonic()
        if not isinstance(error, RefusedError):  # a probe, a scan, or it went away
            _log.info("%s", what)
        elif self._said[0] != what or now > self._said[1] + AGAIN:
            self._said = what, now
            _log.warning("%s", what)


def connect(address: Address, terms: Terms, name: str) -> Socket:
    """Returns a connection to a process that has proven the secret, and knows this one by
    its name. Raises PeerError and OSError.
    """
    sock = dial(address)
    try:
        introduce(sock, terms, name)
    except BaseException:
        sock.close()
        raise
    return sock
