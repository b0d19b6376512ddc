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
from typing import Final

from attrs import define, field

from minfer.effects.execution.tiers.keyed_store import checksum_of
from minfer.effects.execution.tiers.peers.peer_messages import (
    Block,
    Grant,
    Starved,
    Welcome,
    copy_bytes,
    read_to_sender,
    terms_of,
)
from minfer.effects.execution.tiers.peers.remote_memory import RemoteWriter, WriteError
from minfer.effects.net.addresses import Address, address_text
from minfer.effects.net.framing import PeerError, Socket, framed
from minfer.effects.net.handshake import HANDSHAKE_SECONDS
from minfer.effects.net.listener import connect

PATIENCE: Final = 0.5  # seconds that a block waits for a slot, before `Starved` and after
RETRY: Final = 1.0  # seconds after a failure in which blocks are not sent
FULL: Final = 5.0  # seconds after a wait in vain in which no block waits for a slot
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
    writer: RemoteWriter | None  # to the receiver's memory, through NIXL
    slots: list[int] = field(factory=list)  # that may be filled
    full: float = -FULL  # when a block last waited for a slot in vain
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
        """Close the connection, once no thread writes to the receiver's memory: it grants
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
        """Returns a slot; waits for one, unless that was in vain lately, as blocks for
        other engines are sent after this one. Raises PeerError and OSError.
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
                self.sock.sendall(framed(Block(key, slot, length, None)))
            return length
        checksum = checksum_of(contents)
        if self.writer is not None:
            self.writer.write(slot, contents)
            with self.writing:
                self.sock.sendall(framed(Block(key, slot, length, checksum)))
            return length
        head = framed(Block(key, slot, length, checksum, follows=True))
        with self.writing:
            self.sock.sendall(head)
            for part in contents:
                self.sock.sendall(part)
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
    dropped: int = field(init=False, default=0)  # blocks
    _connected: _Connected | None = field(init=False, default=None)
    _opening: threading.Lock = field(init=False, factory=threading.Lock)
    _counting: threading.Lock = field(init=False, factory=threading.Lock)
    _failed: float = field(init=False, default=-RETRY)  # when a connection failed last
    _why: str = field(init=False, default="")  # it failed
    _plain: bool = field(init=False, default=False)  # NIXL has failed, or is not there

    def send(self, key: bytes, contents: Sequence[memoryview]) -> None:
        """Send a block; connects first, if it must. Raises PeerError."""
        try:
            length = self._open().send(key, contents)
        except (PeerError, OSError) as error:
            with self._counting:
                self.dropped += 1
            self._plain = self._plain or isinstance(error, WriteError)
            if not isinstance(error, NoSlotError):
                self._fail(str(error))
            raise PeerError(f"{address_text(self.address)}: {error}") from None
        with self._counting:
            self.sent += 1
            self.sent_bytes += length

    def has_been_broken(self, seconds: float) -> bool:
        """Returns whether its connection is over, or could not be opened, and there was
        no other attempt for so long.
        """
        connected = self._connected
        broken = self._why if connected is None else connected.error
        return bool(broken) and time.monotonic() >= self._failed + seconds

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
                _log.warning(
                    "KV blocks cannot be sent to %s: %s", address_text(self.address), why
                )
            if self._connected is not None:
                self._connected.end(why)

    def _connect(self) -> _Connected:
        """Raises PeerError and OSError."""
        sock = connect(self.address, terms_of(self.layout, self.secret), self.name)
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            connected = self._welcomed(sock)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _WRITING)
        return connected

    def _welcomed(self, sock: Socket) -> _Connected:
        """Returns what the receiver's welcome opens. Raises PeerError and OSError."""
        welcome, descriptors = _read_with_descriptors(sock)
        try:
            return self._opened(sock, welcome, descriptors)
        finally:
            for one in descriptors:
                os.close(one)

    def _opened(
        self, sock: Socket, welcome: object, descriptors: Sequence[int]
    ) -> _Connected:
        """Raises PeerError and OSError."""
        if not isinstance(welcome, Welcome):
            raise PeerError("it is no engine that takes KV blocks")
        memory, writer = None, None
        if welcome.shared:
            if not descriptors:
                raise PeerError("its memory did not come")
            size = welcome.slots * welcome.slot_bytes
            memory = memoryview(mmap.mmap(descriptors[0], size))
        elif welcome.remote is not None and not self._plain:
            try:
                writer = RemoteWriter(welcome.remote, welcome.slot_bytes)
            except WriteError as error:
                self._plain = True
                _log.warning("KV blocks go over TCP alone: %s", error)
        return _Connected(sock, welcome.slot_bytes, memory, writer)


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
