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
    Grant,
    PeerBlock,
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

# A block waits for a slot, before `Starved` and again after it.
SLOT_WAIT_SECONDS: Final = 0.5
RETRY_SECONDS: Final = 1.0  # after a failure, in which blocks are not sent
# After a wait without a slot, in which no other block waits for one.
FULL_SECONDS: Final = 5.0
# A receiver that is stopped reads nothing, for a while or for ever: seconds, and
# microseconds, as the system has them.
_SEND_TIMEOUT: Final = struct.pack("@ll", 5, 0)
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
    full: float = -FULL_SECONDS  # when a block last waited and got no slot
    sending: int = 0  # threads that send a block
    error: str = ""  # why it is over
    changed: threading.Condition = field(factory=threading.Condition)
    writing: threading.Lock = field(factory=threading.Lock)

    def listen(self) -> None:
        """Take granted slots until the connection is over."""
        reason = "another message than granted slots came"
        try:
            while isinstance(message := read_to_sender(self.sock), Grant):
                with self.changed:
                    self.slots += message.slots
                    self.changed.notify_all()
        except (PeerError, OSError) as error:
            reason = str(error)
        self.end(reason)

    def end(self, reason: str) -> None:
        """Close the connection, once no thread writes to the receiver's memory: it grants
        the slots to others then.
        """
        with self.changed:
            self.error = self.error or reason
            self.changed.notify_all()
            if not self.sending:
                self._close()

    def _close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def take_slot(self) -> int:
        """Returns a slot; waits for one, unless a block has got none lately, as blocks
        for other engines are sent after this one. Raises PeerError and OSError.
        """
        may_wait = time.monotonic() >= self.full + FULL_SECONDS
        slot = self._wait_for_slot(SLOT_WAIT_SECONDS if may_wait else 0.0)
        if slot is None and may_wait:
            with self.writing:
                self.sock.sendall(framed(Starved()))
            if (slot := self._wait_for_slot(SLOT_WAIT_SECONDS)) is None:
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
            offset = slot * self.slot_bytes
            for chunk in contents:
                copy_bytes(self.memory[offset : offset + len(chunk)], chunk)
                offset += len(chunk)
            with self.writing:
                self.sock.sendall(framed(PeerBlock(key, slot, length, None)))
            return length
        checksum = checksum_of(contents)
        if self.writer is not None:
            self.writer.write(slot, contents)
            with self.writing:
                self.sock.sendall(framed(PeerBlock(key, slot, length, checksum)))
            return length
        head = framed(PeerBlock(key, slot, length, checksum, follows=True))
        with self.writing:
            self.sock.sendall(head)
            for chunk in contents:
                self.sock.sendall(chunk)
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
    _failed: float = field(
        init=False, default=-RETRY_SECONDS
    )  # when a connection failed last
    _reason: str = field(init=False, default="")  # it failed
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
        broken = self._reason if connected is None else connected.error
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
            if time.monotonic() < self._failed + RETRY_SECONDS:
                raise PeerError(self._reason or "it was closed")
            self._connected = self._connect()
            threading.Thread(
                target=self._connected.listen, name="minfer-kv-send", daemon=True
            ).start()
            return self._connected

    def _fail(self, reason: str) -> None:
        with self._opening:
            if time.monotonic() >= self._failed + RETRY_SECONDS:
                self._failed, self._reason = time.monotonic(), reason
                _log.warning(
                    "KV blocks cannot be sent to %s: %s",
                    address_text(self.address),
                    reason,
                )
            if self._connected is not None:
                self._connected.end(reason)

    def _connect(self) -> _Connected:
        """Open a connection. Raises PeerError and OSError."""
        sock = connect(self.address, terms_of(self.layout, self.secret), self.name)
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            connected = self._read_welcome(sock)
        except BaseException:
            sock.close()
            raise
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        return connected

    def _read_welcome(self, sock: Socket) -> _Connected:
        """Returns what the receiver's welcome opens. Raises PeerError and OSError."""
        welcome, descriptors = _read_with_descriptors(sock)
        try:
            return self._from_welcome(sock, welcome, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _from_welcome(
        self, sock: Socket, welcome: object, descriptors: Sequence[int]
    ) -> _Connected:
        """Returns the connection that a welcome opens. Raises PeerError and OSError."""
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
        message = read_to_sender(sock, first)
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return message, descriptors
