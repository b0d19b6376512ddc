"""Receives blocks from other engines: a thread for each connection, and one that accepts
them.
"""

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from attrs import define, field

from minfer.effects.execution.tiers.peers.inbox import Inbox
from minfer.effects.execution.tiers.peers.peer_messages import (
    VERSION,
    Block,
    Challenge,
    Grant,
    Hello,
    PeerError,
    Refused,
    Socket,
    Starved,
    ToSender,
    Welcome,
    checksum_of,
    framed,
    is_proof,
    new_nonce,
    proof,
    read_exactly,
    read_to_receiver,
)

GREETING: Final = 5.0  # seconds that a sender has to introduce itself
_log = logging.getLogger("minfer.peers")


@define(eq=False)
class Listener:
    """Receives blocks for an inbox on a socket that listens: a local one, whose senders
    share the inbox's memory, or a TCP port.
    """

    inbox: Inbox
    layout: bytes
    secret: bytes
    sock: Socket
    _numbers: "itertools.count[int]" = field(init=False, factory=itertools.count)
    _open: dict[int, Socket] = field(init=False, factory=dict)
    _closing: bool = field(init=False, default=False)

    def start(self) -> None:
        """Accept connections from now on."""
        threading.Thread(target=self._accept, name="minfer-kv-peers", daemon=True).start()

    @property
    def local(self) -> bool:
        """Whether senders are on this host."""
        return self.sock.family == socket.AF_UNIX

    def close(self) -> None:
        """Close all connections."""
        self._closing = True
        for one in (self.sock, *self._open.copy().values()):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self.sock.accept()
            except OSError as error:
                if not self._closing:
                    _log.warning("KV blocks can no longer be received: %s", error)
                return
            number = next(self._numbers)
            self._open[number] = connection
            serve = partial(self._serve, number, connection)
            threading.Thread(target=serve, name="minfer-kv-peer", daemon=True).start()

    def _serve(self, number: int, sock: Socket) -> None:
        try:
            with sock:
                self._greet(number, sock)
                while True:
                    self._receive(number, sock)
        except (PeerError, OSError, ValueError) as error:
            if not self._closing:
                _log.info("an engine that sends KV blocks has gone: %s", error)
        finally:
            self.inbox.leave(number)
            self._open.pop(number, None)

    def _greet(self, number: int, sock: Socket) -> None:
        """Exchange proofs, and grant slots. Raises PeerError."""
        sock.settimeout(GREETING)
        nonce = new_nonce()
        sock.sendall(framed(Challenge(nonce)))
        hello = read_to_receiver(sock)
        if not isinstance(hello, Hello):
            self._refuse(sock, "no introduction came")
        if hello.version != VERSION:
            self._refuse(sock, f"version {VERSION} is spoken, not {hello.version}")
        if not is_proof(self.secret, hello.mac, "sender", nonce, hello.nonce):
            self._refuse(sock, "the secret is another one")
        if hello.layout != self.layout:
            self._refuse(sock, "the model, or how its KV is stored, is another one")
        shared = self.local and self.inbox.descriptor >= 0
        mac = proof(self.secret, "receiver", nonce, hello.nonce)
        welcome = Welcome(self.inbox.slots, self.inbox.slot_bytes, mac, shared)
        if shared:
            socket.send_fds(sock, [framed(welcome)], [self.inbox.descriptor])
        else:
            sock.sendall(framed(welcome))
        sock.settimeout(None)
        _log.info("engine %r sends KV blocks", hello.name)
        self.inbox.join(number, _granting(sock))

    def _refuse(self, sock: Socket, why: str) -> NoReturn:
        _log.warning("an engine may send no KV blocks: %s", why)
        sock.sendall(framed(Refused(why)))
        raise PeerError(why)

    def _receive(self, number: int, sock: Socket) -> None:
        """Receive a message. Raises PeerError, ValueError and OSError."""
        block = read_to_receiver(sock)
        if isinstance(block, Starved):
            self.inbox.make_room(number)
            return
        if not isinstance(block, Block):
            raise PeerError("a second introduction")
        if not (self.local and self.inbox.descriptor >= 0):
            if not 0 <= block.length <= self.inbox.slot_bytes:
                raise PeerError(f"a block of {block.length} bytes")
            if not 0 <= block.slot < self.inbox.slots:
                raise PeerError(f"slot {block.slot} was not granted")
            contents = self.inbox.slot(block.slot, block.length)
            read_exactly(sock, contents)
            if checksum_of(contents) != block.checksum:
                raise PeerError("a block was changed on its way")
        self.inbox.arrived(number, block.key, block.slot, block.length)


def _granting(sock: Socket) -> Callable[[tuple[int, ...]], None]:
    lock = threading.Lock()

    def send(slots: tuple[int, ...]) -> None:
        message: ToSender = Grant(slots)
        with lock, suppress(OSError):  # its own thread notices that it has gone
            sock.sendall(framed(message))

    return send


def listen_locally(path: Path) -> Socket:
    """Returns a local socket that listens at `path`. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path.unlink(missing_ok=True)
    sock.bind(os.fspath(path))
    sock.listen()
    return sock


def listen_on_port(host: str, port: int) -> Socket:
    """Returns a socket that listens on a TCP port. Raises OSError."""
    return socket.create_server((host, port))
