"""Receives blocks from other engines: a thread for each connection, and one that accepts
them.
"""

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from attrs import define, field

from minfer.effects.execution.tiers.peers.inbox import Inbox
from minfer.effects.execution.tiers.peers.peer_messages import (
    VERSION,
    Address,
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
RETRY: Final = 1.0  # seconds after a connection could not be accepted
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
            except OSError as error:  # no descriptors are left, or the sender has gone
                if not self._closing:
                    _log.warning("an engine that sends KV blocks waits: %s", error)
                    time.sleep(RETRY)
                continue
            number = next(self._numbers)
            self._open[number] = connection
            serve = partial(self._serve, number, connection)
            one = threading.Thread(target=serve, name="minfer-kv-peer", daemon=True)
            try:
                one.start()
            except RuntimeError as error:
                _log.warning("an engine may send no KV blocks: %s", error)
                self._open.pop(number).close()

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
            contents = self.inbox.granted(number, block.slot, block.length)
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


def listen_at(address: Address) -> Socket:
    """Returns a socket that listens: a local one, at a path, or a TCP port. Raises
    OSError.
    """
    if not isinstance(address, Path):
        return socket.create_server(address)
    address.unlink(missing_ok=True)  # of an earlier engine
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(address))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock
