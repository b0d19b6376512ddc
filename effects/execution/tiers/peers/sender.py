"""Sends blocks to another engine, over one connection that is kept."""

import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import define, field

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
    Welcome,
    checksum_of,
    copy_bytes,
    framed,
    is_proof,
    new_nonce,
    proof,
    read_to_sender,
)

GREETING: Final = 5.0  # seconds to connect in
PATIENCE: Final = 0.5  # seconds that a block waits for a slot, twice
RETRY: Final = 1.0  # seconds after a failure in which blocks are not sent
FULL: Final = 5.0  # seconds after a block waited in vain, in which none waits for a slot
# A receiver that is stopped reads nothing, for a while or for ever: seconds, and
# microseconds, as the system has them.
_WRITING: Final = struct.pack("@ll", 5, 0)
_log = logging.getLogger("minfer.peers")


class NoSlotError(PeerError):
    """The receiver has no room."""


@define(eq=False)
class _Connected:
    """An open connection."""

    sock: Socket
    slot_bytes: int
    memory: memoryview | None  # of the receiver, if it is shared
    slots: list[int] = field(factory=list)  # that may be filled
    full: float = -FULL  # when a block waited for a slot in vain
    sending: int = 0  # threads that send a block
    error: str = ""  # why it is over
    changed: threading.Condition = field(factory=threading.Condition)
    writing: threading.Lock = field(factory=threading.Lock)

    def listen(self) -> None:
        """Take granted slots until the connection is over."""
        why = "another message than granted slots came"
        try:
            while isinstance(message := read_to_sender(self.sock), Grant):
                with self.changed:
                    self.slots += message.slots
                    self.changed.notify_all()
        except (PeerError, OSError) as error:
            why = str(error)
        self.end(why)

    def end(self, why: str) -> None:
        """Close the connection, once nobody writes to the receiver's memory: it grants
        the slots to others then.
        """
        with self.changed:
            self.error = self.error or why
            self.changed.notify_all()
            if not self.sending:
                self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def take_slot(self) -> int:
        """Returns a slot; waits for one, unless that was in vain lately: blocks for other
        engines are sent behind this one. Raises PeerError and OSError.
        """
        patient = time.monotonic() >= self.full + FULL
        slot = self._wait_for_slot(PATIENCE if patient else 0.0)
        if slot is None and patient:
            with self.writing:
                self.sock.sendall(framed(Starved()))
            if (slot := self._wait_for_slot(PATIENCE)) is None:
                self.full = time.monotonic()
        if slot is None:
            raise NoSlotError("it has no room for blocks")
        return slot

    def _wait_for_slot(self, patience: float) -> int | None:
        with self.changed:
            self.changed.wait_for(lambda: self.slots or self.error, patience)
            if self.error:
                raise PeerError(self.error)
            return self.slots.pop() if self.slots else None

    def send(self, key: bytes, contents: Sequence[memoryview]) -> int:
        """Send a block; returns its bytes. Raises PeerError and OSError."""
        with self.changed:
            self.sending += 1
        try:
            return self._send(key, contents)
        finally:
            with self.changed:
                self.sending -= 1
                if self.error and not self.sending:
                    self._close()

    def _send(self, key: bytes, contents: Sequence[memoryview]) -> int:
        length, slot = sum(map(len, contents)), self.take_slot()
        if length > self.slot_bytes:
            raise PeerError(f"a block of {length} bytes; a slot has {self.slot_bytes}")
        if self.memory is not None:
            at = slot * self.slot_bytes
            for part in contents:
                copy_bytes(self.memory[at : at + len(part)], part)
                at += len(part)
            with self.writing:
                self.sock.sendall(framed(Block(key, slot, length, 0)))
            return length
        whole = contents[0] if len(contents) == 1 else memoryview(b"".join(contents))
        head = framed(Block(key, slot, length, checksum_of(whole)))
        with self.writing:
            self.sock.sendall(head)
            self.sock.sendall(whole)
        return length


@define(eq=False)
class Sender:
    """Sends blocks to the engine at an address. Methods may be called from any thread."""

    address: Address
    layout: bytes
    secret: bytes
    name: str = ""  # of this engine
    sent: int = field(init=False, default=0)  # blocks
    sent_bytes: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)  # of sending, of all threads
    dropped: int = field(init=False, default=0)  # blocks
    _connected: _Connected | None = field(init=False, default=None)
    _opening: threading.Lock = field(init=False, factory=threading.Lock)
    _counting: threading.Lock = field(init=False, factory=threading.Lock)
    _failed: float = field(init=False, default=-RETRY)  # when
    _why: str = field(init=False, default="")

    def send(self, key: bytes, contents: Sequence[memoryview]) -> None:
        """Send a block; connects first, if it must. Raises PeerError."""
        began = time.monotonic()
        try:
            length = self._open().send(key, contents)
        except (PeerError, OSError) as error:
            with self._counting:
                self.dropped += 1
            if not isinstance(error, NoSlotError):
                self._fail(str(error))
            raise PeerError(f"{self._where()}: {error}") from None
        with self._counting:
            self.sent += 1
            self.sent_bytes += length
            self.seconds += time.monotonic() - began

    def close(self) -> None:
        """Close the connection."""
        with self._opening:
            if self._connected is not None:
                self._connected.end("it was closed")
            self._failed = float("inf")

    def _open(self) -> _Connected:
        with self._opening:
            if self._connected is not None and not self._connected.error:
                return self._connected
            if time.monotonic() < self._failed + RETRY:
                raise PeerError(self._why or "it was closed")
            self._connected = self._connect()
            threading.Thread(
                target=self._connected.listen, name="minfer-kv-send", daemon=True
            ).start()
            return self._connected

    def _fail(self, why: str) -> None:
        with self._opening:
            if time.monotonic() >= self._failed + RETRY:
                self._failed, self._why = time.monotonic(), why
                _log.warning("KV blocks cannot be sent to %s: %s", self._where(), why)
            if self._connected is not None:
                self._connected.end(why)

    def _connect(self) -> _Connected:
        """Raises PeerError and OSError."""
        sock = _dial(self.address)
        try:
            connected = self._greet(sock)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _WRITING)
        return connected

    def _greet(self, sock: Socket) -> _Connected:
        challenge = read_to_sender(sock)
        if not isinstance(challenge, Challenge):
            raise PeerError("it is no engine that takes KV blocks")
        nonce = new_nonce()
        mac = proof(self.secret, "sender", challenge.nonce, nonce)
        sock.sendall(framed(Hello(VERSION, self.name, self.layout, nonce, mac)))
        welcome, descriptors = _read_with_descriptors(sock)
        try:
            return self._welcomed(sock, welcome, descriptors, challenge.nonce, nonce)
        finally:
            for one in descriptors:
                os.close(one)

    def _welcomed(
        self, sock: Socket, welcome: object, descriptors: Sequence[int], *nonces: bytes
    ) -> _Connected:
        """Raises PeerError and OSError."""
        if isinstance(welcome, Refused):
            raise PeerError(f"it refuses: {welcome.why}")
        if not isinstance(welcome, Welcome):
            raise PeerError("it is no engine that takes KV blocks")
        if not is_proof(self.secret, welcome.mac, "receiver", *nonces):
            raise PeerError("it does not know the secret")
        memory = None
        if welcome.shared:
            if not descriptors:
                raise PeerError("its memory did not come")
            size = welcome.slots * welcome.slot_bytes
            memory = memoryview(mmap.mmap(descriptors[0], size))
        return _Connected(sock, welcome.slot_bytes, memory)

    def _where(self) -> str:
        if isinstance(self.address, Path):
            return self.address.name
        return "{}:{}".format(*self.address)


def _dial(address: Address) -> Socket:
    """Returns a connection. Raises OSError."""
    if not isinstance(address, Path):
        sock = socket.create_connection(address, GREETING)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(GREETING)
        sock.connect(os.fspath(address))
    except OSError:
        sock.close()
        raise
    return sock


def _read_with_descriptors(sock: Socket) -> tuple[object, list[int]]:
    """Read a message that may have descriptors of files beside its first byte."""
    if sock.family != socket.AF_UNIX:
        return read_to_sender(sock), []
    first, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    try:
        said = read_to_sender(sock, first)
    except BaseException:
        for one in descriptors:
            os.close(one)
        raise
    return said, descriptors
