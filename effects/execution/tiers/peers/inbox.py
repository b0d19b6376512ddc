"""Memory for blocks that other engines send, until this engine fetches them.

Theory. It is divided into slots, each as large as the largest block:

    free ----> granted to a connection ----> here, under its key ----> free
                     |                                   (fetched, or evicted: the oldest)
                     +----> free (the connection has ended)

A sender fills slots that were granted to it. No thread reads a slot before its block is
here. The checksum is compared with the copy that is fetched, so a sender that writes to a
slot when it must not is noticed.

Blocks that the engine computes itself meanwhile are never fetched, so the inbox fills up.
Old blocks are evicted as soon as slots are needed, others once a sender has waited.

The engine waits for a block as long as other blocks arrive, up to a bound: the block may
have been lost, and the blocks of other requests are fetched after it.
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

from minfer.effects.execution.tiers.keyed_store import checksum_of
from minfer.effects.execution.tiers.peers.peer_messages import copy_bytes
from minfer.effects.net.framing import PeerError

WAIT_SECONDS: Final = 2.0  # without any block, after which none is waited for
# Instead, if the last block did not come, nor any other since then.
SILENT_WAIT_SECONDS: Final = 0.25
MAX_WAIT_SECONDS: Final = 10.0  # that a block is waited for while others come
OLD_SECONDS: Final = 10.0  # after which a block will hardly be fetched any more
# A connection is granted at most 1/4 of all slots at a time.
CONNECTION_DIVISOR: Final = 4
LOW_DIVISOR: Final = 4  # old blocks are evicted while it has less than 1/4 of its share


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
    length: int  # bytes
    checksum: int | None
    since: float


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
    _blocks: OrderedDict[bytes, _Arrived] = field(init=False, factory=OrderedDict)
    _connections: dict[int, _Connection] = field(init=False, factory=dict)
    _last_arrival: float = field(init=False)  # when the last block came
    # The last block that was waited for did not come, nor any since: senders may be gone.
    _silent: bool = field(init=False, default=False)
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
        self._last_arrival = self.clock()

    def slot(self, number: int, length: int) -> memoryview:
        """Returns the first `length` bytes of a slot."""
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
            if (removed := self._connections.pop(connection, None)) is not None:
                self._free += removed.slots
        self._grant_free()

    def granted(self, connection: int, slot: int, length: int) -> memoryview:
        """Returns the slot that a block is written to. Raises ValueError for one that is
        not the connection's, or smaller.
        """
        with self._changed:
            slots = self._connections[connection].slots
            if slot not in slots or not 0 <= length <= self.slot_bytes:
                raise ValueError(f"slot {slot} was not granted for {length} bytes")
        return self.slot(slot, length)

    def arrived(
        self,
        connection: int,
        key: bytes,
        slot: int,
        length: int,
        checksum: int | None = None,
    ) -> None:
        """Note that a granted slot holds a block. Raises ValueError as `granted`."""
        with self._changed:
            self.granted(connection, slot, length)
            self._connections[connection].slots.remove(slot)
            if (old := self._blocks.pop(key, None)) is not None:
                self._free.append(old.slot)
            self._last_arrival, self._silent = self.clock(), False
            self._blocks[key] = _Arrived(slot, length, checksum, self._last_arrival)
            self.received += 1
            self.received_bytes += length
            self._changed.notify_all()
        self._grant_free()

    def make_room(self, connection: int) -> None:
        """Evict the oldest block for a sender that waits for a slot."""
        with self._changed:
            if connection in self._connections and not self._free and self._blocks:
                self._evict()
        self._grant_free()

    def _evict(self) -> None:
        _, oldest = self._blocks.popitem(last=False)
        self.evicted += 1
        self._free.append(oldest.slot)

    def _evict_old(self, num_slots: int) -> None:
        """Evict old blocks until `num_slots` slots are free."""
        latest = self.clock() - OLD_SECONDS
        while len(self._free) < num_slots and self._blocks:
            if next(iter(self._blocks.values())).since > latest:
                break
            self._evict()

    def _grant_free(self) -> None:
        """Grant slots to the connections that have less than their share."""
        grants = list[tuple[Grant, tuple[int, ...]]]()
        with self._changed:
            max_slots = max(1, self.slots // CONNECTION_DIVISOR)
            min_slots = max(1, max_slots // LOW_DIVISOR)
            for connection in self._connections.values():
                self._evict_old(min_slots - len(connection.slots))
                count = min(max_slots - len(connection.slots), len(self._free))
                new = [self._free.pop() for _ in range(count)]
                connection.slots.update(new)
                if new:
                    grants.append((connection.grant, tuple(new)))
        for grant, slots in grants:
            grant(slots)

    # --- the engine ---------------------------------------------------------------------

    def fetch(self, key: bytes, contents: Sequence[memoryview]) -> None:
        """Copy a block, and free its slot; waits for it. Raises NotSentError."""
        block = self._wait(key)
        try:
            if block.length != sum(map(len, contents)):
                raise NotSentError(f"a block of {block.length} bytes came")
            offset, data = 0, self.slot(block.slot, block.length)
            for chunk in contents:
                copy_bytes(chunk, data[offset : offset + len(chunk)])
                offset += len(chunk)
        finally:
            with self._changed:
                self._free.append(block.slot)
            self._grant_free()
        if block.checksum not in (None, checksum_of(contents)):
            raise NotSentError("a block was changed on its way")

    def _wait(self, key: bytes) -> _Arrived:
        began = self.clock()
        with self._changed:
            while (block := self._blocks.pop(key, None)) is None:
                patience = SILENT_WAIT_SECONDS if self._silent else WAIT_SECONDS
                deadline = min(
                    max(self._last_arrival, began) + patience, began + MAX_WAIT_SECONDS
                )
                left = deadline - self.clock()
                if left <= 0 or self._closed:
                    self._silent = True
                    raise NotSentError("no other engine has sent it")
                self._changed.wait(left)
            return block

    def close(self) -> None:
        """End all waits. The memory is released once no thread uses it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        with suppress(BufferError):  # a connection still has a view of it
            self.memory.release()
            self._map.close()
