"""Receives blocks from other engines, each on a thread of its own."""

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from attrs import define, field

from minfer.effects.execution.tiers.peers.inbox import Inbox
from minfer.effects.execution.tiers.peers.peer_messages import (
    Grant,
    RemoteMemory,
    Starved,
    ToSender,
    Welcome,
    read_to_receiver,
    terms_of,
)
from minfer.effects.net.framing import (
    PeerError,
    Socket,
    framed,
    read_exactly,
)
from minfer.effects.net.listener import Listener

_PEER: Final = "an engine that wants to send KV blocks"
_log = logging.getLogger("minfer.peers")


@define(eq=False)
class BlockReceiver:
    """Receives blocks for an inbox on a socket that listens: a local one, whose senders
    share the inbox's memory, or a TCP port.
    """

    inbox: Inbox
    layout: bytes
    secret: bytes
    sock: Socket
    remote: RemoteMemory | None = None  # how the inbox is written to from other machines
    _listener: Listener = field(init=False)
    _numbers: "itertools.count[int]" = field(init=False, factory=itertools.count)
    _open: dict[int, Socket] = field(init=False, factory=dict)
    _closing: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        terms = terms_of(self.layout, self.secret)
        self._listener = Listener(self.sock, terms, self._serve, _PEER)

    def start(self) -> None:
        """Accept connections from now on."""
        self._listener.start()

    @property
    def shares(self) -> bool:
        """Whether senders share the inbox's memory."""
        return self.sock.family == socket.AF_UNIX and self.inbox.descriptor >= 0

    def close(self) -> None:
        """Close all connections."""
        self._closing = True
        self._listener.close()
        for sock in self._open.copy().values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve(self, sock: Socket, name: str) -> None:
        """Receive from an engine that has proven the secret, until it ends."""
        number = next(self._numbers)
        self._open[number] = sock
        try:
            with sock:
                self._welcome(number, sock)
                _log.info("engine %r sends KV blocks", name)
                while True:
                    self._receive(number, sock)
        except (PeerError, OSError, ValueError) as error:
            if not self._closing:
                _log.info("an engine that sends KV blocks has gone: %s", error)
        finally:
            self.inbox.leave(number)
            self._open.pop(number, None)

    def _welcome(self, number: int, sock: Socket) -> None:
        slots, size, shares = self.inbox.slots, self.inbox.slot_bytes, self.shares
        remote = None if shares else self.remote
        welcome = framed(Welcome(slots, size, shares, remote))
        if shares:
            socket.send_fds(sock, [welcome], [self.inbox.descriptor])
        else:
            sock.sendall(welcome)
        self.inbox.join(number, _granting(sock))

    def _receive(self, number: int, sock: Socket) -> None:
        """Receive a message. Raises PeerError, ValueError and OSError."""
        block = read_to_receiver(sock)
        if isinstance(block, Starved):
            self.inbox.make_room(number)
            return
        if block.follows:
            read_exactly(sock, self.inbox.granted(number, block.slot, block.length))
        if block.checksum is None and not self.shares:
            raise PeerError("a block without a checksum")
        self.inbox.arrived(number, block.key, block.slot, block.length, block.checksum)


def _granting(sock: Socket) -> Callable[[tuple[int, ...]], None]:
    lock = threading.Lock()

    def send(slots: tuple[int, ...]) -> None:
        message: ToSender = Grant(slots)
        with lock, suppress(OSError):  # its own thread notices that it has gone
            sock.sendall(framed(message))

    return send
