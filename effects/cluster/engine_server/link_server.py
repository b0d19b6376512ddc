"""The engine's end of its links: connections of API servers, in a thread of their own.

The engine's stepping thread must never wait for an API server: bytes that an API server's
socket does not take at once are kept for the links' thread, which sends them when the
socket is ready. An API server that takes nothing while `MAX_UNSENT_BYTES` wait for it is
disconnected. A link with invalid messages is closed, and no other one. If the links'
thread itself breaks, the engine counts as broken, as no API server could reach it.

API servers of this machine and of other ones come through a `Listener`, and both ends
know then that they speak the same version and have the same secret (`accept_links`). From
there on, all links are alike.
"""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from minfer.effects.cluster.engine_server.engine_server import EngineServer
from minfer.effects.cluster.engine_server.output_routing import Session
from minfer.effects.cluster.link import link_messages as wire
from minfer.effects.execution.warming.start_progress import START
from minfer.effects.live.client import EngineDied
from minfer.effects.net.framing import FrameReader, PeerError, Socket, frame
from minfer.effects.net.handshake import Terms
from minfer.effects.net.listener import Listener

MAX_UNSENT_BYTES: Final = 2**27  # that wait for an API server
TICK_SECONDS: Final = 0.1  # between two reports of the engine's state
_READ_BYTES: Final = 2**18  # at once

log = logging.getLogger("minfer.link")
_start_log = logging.getLogger(START)  # what it says is shown


class LinkServer:
    """Links of API servers to an engine server, in a thread of their own."""

    def __init__(self, engine_server: EngineServer) -> None:
        self._engine_server = engine_server
        self._listeners = list[Listener]()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._new_connections = deque[Socket]()  # that the thread does not serve yet
        self._closing = False
        self._over = False  # the thread serves no more
        self._thread = threading.Thread(target=self._run, name="minfer-links")
        self._thread.daemon = True

    def start(self) -> None:
        """Serve links from now on."""
        self._thread.start()

    def accept_links(self, sock: Socket, terms: Terms) -> None:
        """Accept links of API servers at a socket that listens."""
        is_local = sock.family == socket.AF_UNIX
        peer = "an API server" if is_local else "an API server of another machine"

        def enter(connection: Socket, name: str) -> None:
            if not is_local:
                _start_log.info("%s (%s) is linked", peer, name)
            self.add_connection(connection)

        listener = Listener(sock, terms, enter, peer)
        self._listeners.append(listener)
        listener.start()

    def add_connection(self, connection: Socket) -> None:
        """Serve an API server on a connection that is there, from any thread."""
        self._new_connections.append(connection)
        self.wake()
        if self._over:
            self._close_new_connections()

    def close(self) -> None:
        """Close all links."""
        self._closing = True
        self.wake()
        self._thread.join()

    def wake(self) -> None:
        """Wake the thread to send unsent bytes."""
        with contextlib.suppress(BlockingIOError, OSError):  # it is awake, or ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        links: set[_Link] = set()
        try:
            self._serve(links)
        except BaseException as error:  # any error: the engine is unreachable then
            log.exception("the thread of the links broke")
            self._engine_server.handle_message(
                EngineDied((), f"the thread of the links broke: {error!r}")
            )
        finally:
            for listener in self._listeners:
                listener.close()
            self._over = True
            self._close_new_connections()
            for link in links:
                self._drop(link)
            self._selector.close()
            for end in (self._woken, self._waker):
                end.close()

    def _close_new_connections(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._new_connections.popleft().close()

    def _serve(self, links: "set[_Link]") -> None:
        last_tick = 0.0
        while not self._closing:
            for key, mask in self._selector.select(TICK_SECONDS):
                if key.fileobj is self._woken:
                    self._woken.recv(_READ_BYTES)
                elif mask & selectors.EVENT_READ:
                    key.data.read()
            while self._new_connections:
                self._add_link(self._new_connections.popleft(), links)
            for link in list(links):
                if link.flush():
                    self._watch(link)
                else:
                    links.discard(link)
                    self._drop(link)
            now = time.monotonic()
            if now >= last_tick + TICK_SECONDS:
                self._engine_server.tick()
                last_tick = now

    def _add_link(self, connection: Socket, links: "set[_Link]") -> None:
        connection.setblocking(False)
        link = _Link(connection, self._engine_server, self.wake)
        self._selector.register(connection, link.watched, link)
        links.add(link)
        self._engine_server.join(link.session)

    def _watch(self, link: "_Link") -> None:
        """Wait for a writable socket only while bytes are unsent."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        if events != link.watched:
            link.watched = events
            self._selector.modify(link.connection, events, link)

    def _drop(self, link: "_Link") -> None:
        self._selector.unregister(link.connection)
        link.connection.close()
        self._engine_server.leave(link.session)


class _Link:
    """One API server's link, at the engine's end."""

    def __init__(
        self, connection: Socket, engine_server: EngineServer, wake: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.session = Session(self.send)
        self.watched = selectors.EVENT_READ  # what the selector waits for
        self._engine_server = engine_server
        self._wake = wake
        self._frames = FrameReader(wire.MAX_MESSAGE_BYTES)
        self._lock = threading.Lock()  # guards the attributes below
        self.unsent = bytearray()  # bytes that the socket did not take yet
        self._over = False

    def send(self, message: bytes) -> None:
        """Send, in any thread, at once if the socket takes it."""
        with self._lock:
            if self._over:
                return
            data = frame(message)
            if not self.unsent:
                data = data[self._sent(data) :]
            self.unsent += data
        if data:
            self._wake()

    def flush(self) -> bool:
        """Send unsent bytes; returns False if the link is over."""
        with self._lock:
            if self.unsent and not self._over:
                del self.unsent[: self._sent(self.unsent)]
                if len(self.unsent) > MAX_UNSENT_BYTES:
                    log.warning("an API server takes nothing any more: its link is cut")
                    self._over = True
            return not self._over

    def read(self) -> None:
        """Read and handle incoming messages."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # the API server has disconnected
            data = b""
        if not data:
            self._over = True
        try:
            for message in self._frames.feed(data):
                self._engine_server.receive(self.session, wire.read_to_engine(message))
        except PeerError as error:
            log.warning("an API server's link is cut: %s", error)
            self._over = True
        except Exception:  # a bug here must not end the other links
            log.exception("an API server's link is cut")
            self._over = True

    def _sent(self, data: bytes | bytearray) -> int:
        """Send; returns how many bytes the socket took."""
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._over = True
            return 0
