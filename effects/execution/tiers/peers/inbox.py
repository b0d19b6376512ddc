"""Memory for blocks that other engines send, until this engine fetches them.

Theory. It is divided into slots, each as large as the largest block:

    free ----> granted to a connection ----> here, under its key ----> free
                     |                                   (fetched, or evicted: the oldest)
                     +----> free (the connection has ended)

A block's checksum is that of the copy that is fetched, so whatever is written to its slot
when it must not be is found out.

A sender fills slots that were granted to it, and nobody reads a slot before its block is
here. A block that comes late is waited for as long as any block came lately. Once that
was in vain, the next ones are hardly waited for, until any comes: a sender that has gone
delays its requests once.
"""

import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from attrs import define, field, frozen

from minfer.effects.execution.tiers.peers.framing import PeerError
from minfer.effects.execution.tiers.peers.peer_messages import checksum_of, copy_bytes

PATIENCE: Final = 2.0  # seconds without any block, after which none is waited for
BRIEF: Final = 0.2  # likewise, after it was waited in vain
SHARE: Final = 4  # a connection may fill one of so many slots at once


class NotSentError(PeerError):
    """A block has not come."""


Grant = Callable[[tuple[int, ...]], None]  # sends granted slots


@define(eq=False)
class _Connection:
    """What a sender may fill."""

    grant: Grant
    slots: set[int] = field(factory=set)


@frozen
class _Arrived:
    """A block that is here."""

    slot: int
    length: int
    checksum: int | None


@define(eq=False)
class Inbox:
    """Slots of `slot_bytes` each. Methods may be called from any thread."""

    slots: int
    slot_bytes: int
    clock: Callable[[], float] = time.monotonic
    descriptor: int = field(init=False, default=-1)  # of the memory; -1: not shared
    memory: memoryview = field(init=False, repr=False)
    received: int = field(init=False, default=0)  # blocks
    received_bytes: int = field(init=False, default=0)
    evicted: int = field(init=False, default=0)  # blocks that were not fetched
    _map: mmap.mmap = field(init=False, repr=False)
    _changed: threading.Condition = field(init=False, factory=threading.Condition)
    _free: list[int] = field(init=False)
    # By key; the oldest first.
    _here: OrderedDict[bytes, _Arrived] = field(init=False, factory=OrderedDict)
    _connections: dict[int, _Connection] = field(init=False, factory=dict)
    _last: float = field(init=False)  # when a block came
    _in_vain: float = field(init=False, default=-1.0)  # when a wait ended so
    _closed: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        """Allocates the memory. Raises OSError."""
        size = self.slots * self.slot_bytes
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("minfer-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        self.memory = memoryview(self._map)
        self._free = [*reversed(range(self.slots))]
        self._last = self.clock()

    def slot(self, number: int, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        first = number * self.slot_bytes
        return self.memory[first : first + length]

    # --- connections --------------------------------------------------------------------

    def join(self, connection: int, grant: Grant) -> None:
        """Add a connection, to which `grant` sends slots."""
        with self._changed:
            self._connections[connection] = _Connection(grant)
        self._grant_free()

    def leave(self, connection: int) -> None:
        """Remove a connection: what it was about to fill is free."""
        with self._changed:
            if (gone := self._connections.pop(connection, None)) is not None:
                self._free += gone.slots
        self._grant_free()

    def may_fill(self, connection: int, slot: int) -> bool:
        """Returns whether a slot is granted to a connection, and empty."""
        with self._changed:
            return slot in self._connections[connection].slots

    def arrived(
        self,
        connection: int,
        key: bytes,
        slot: int,
        length: int,
        checksum: int | None = None,
    ) -> None:
        """Note that a granted slot holds a block. Raises ValueError for a slot that is
        not the connection's.
        """
        with self._changed:
            slots = self._connections[connection].slots
            if slot not in slots or not 0 <= length <= self.slot_bytes:
                raise ValueError(f"slot {slot} was not granted for {length} bytes")
            slots.remove(slot)
            if (old := self._here.pop(key, None)) is not None:
                self._free.append(old.slot)
            self._here[key] = _Arrived(slot, length, checksum)
            self.received += 1
            self.received_bytes += length
            self._last = self.clock()
            self._changed.notify_all()
        self._grant_free()

    def make_room(self, connection: int) -> None:
        """Evict the oldest block, if a connection has no slot: nobody fetches it."""
        with self._changed:
            starved = not self._connections[connection].slots
            if starved and not self._free and self._here:
                _, oldest = self._here.popitem(last=False)
                self.evicted += 1
                self._free.append(oldest.slot)
        self._grant_free()

    def _grant_free(self) -> None:
        """Grant slots to the connections that have less than their share."""
        due = list[tuple[Grant, tuple[int, ...]]]()
        with self._changed:
            most = max(1, self.slots // SHARE)
            for one in self._connections.values():
                count = min(most - len(one.slots), len(self._free))
                new = [self._free.pop() for _ in range(count)]
                one.slots.update(new)
                if new:
                    due.append((one.grant, tuple(new)))
        for grant, slots in due:
            grant(slots)

    # --- the engine ---------------------------------------------------------------------

    def fetch(self, key: bytes, contents: Sequence[memoryview]) -> None:
        """Copy a block, and free its slot; waits for it. Raises NotSentError."""
        found, at = self._wait(key), 0
        try:
            if found.length != sum(map(len, contents)):
                raise NotSentError(f"a block of {found.length} bytes came")
            for part in contents:
                copy_bytes(part, self.slot(found.slot, found.length)[at:][: len(part)])
                at += len(part)
        finally:
            with self._changed:
                self._free.append(found.slot)
            self._grant_free()
        if found.checksum not in (None, checksum_of(contents)):
            raise NotSentError("a block was changed on its way")

    def _wait(self, key: bytes) -> _Arrived:
        began = self.clock()
        with self._changed:
            while (found := self._here.pop(key, None)) is None:
                patience = PATIENCE if self._last > self._in_vain else BRIEF
                left = max(self._last, began) + patience - self.clock()
                if left <= 0 or self._closed:
                    self._in_vain = self.clock()
                    raise NotSentError("no other engine has sent it")
                self._changed.wait(left)
            return found

    def close(self) -> None:
        """Wake who waits. The memory is released when nobody uses it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        with suppress(BufferError):  # a connection still has a view of it
            self.memory.release()
            self._map.close()
