"""Copies KV blocks between the device and a keyed store, beside the steps: files, or what
other engines send and receive.

Like copies to host memory (`page_copier`), a transfer needs no order among the steps, and
each direction has a thread with two buffers. A piece of a transfer is in a buffer's host
memory, from which it is written to the store, or to which it is read, by threads: the
checksum of a block takes as long as its copy from the page cache, both run without the
interpreter's lock, and disks are fastest with several requests at once. Meanwhile the
other piece is on its way between host memory and the device.
"""

import hashlib
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_EXCEPTION,
    Future,
    ThreadPoolExecutor,
    wait,
)
from queue import SimpleQueue
from typing import Final

import torch
from attrs import define, field, frozen

from minfer.blocks.keys import DIGEST, Key
from minfer.blocks.prefix import Pages, bundles, flattened
from minfer.effects.execution.device.streams import on
from minfer.effects.execution.tiers.block_files import LAYOUT_BYTES, MISSING
from minfer.effects.execution.tiers.block_folder import REFUSED, BlockFolder
from minfer.effects.execution.tiers.host_pages import NoHostMemoryError
from minfer.effects.execution.tiers.keyed_store import KeyedStore, NotStoredError
from minfer.effects.execution.tiers.paged_tensors import (
    PagedTensor,
    Track,
    pages_per_piece,
)
from minfer.effects.execution.tiers.transfer_thread import ReportEnd, TransferThread
from minfer.effects.net.framing import PeerError
from minfer.records.config import CacheGroup
from minfer.records.messages import FetchBlocks, Lost, Moved, StoreBlocks
from minfer.values.checks import ConfigError

SLOTS_PER_DIRECTION: Final = 2
# That read, and that write.
STORE_THREADS: Final = min(8, max(2, (os.cpu_count() or 1) // 2))
REPEATS: Final = 2
KeyedCommand = StoreBlocks | FetchBlocks
Blocks = Sequence[tuple[Key, Pages]]


class BlocksRemovedError(Exception):
    """Blocks were removed before they were loaded: other engines needed the room."""


@frozen(eq=False)
class _Slot:
    """Room for a piece: host memory, and a buffer on the device for each tensor."""

    tensors: Sequence[PagedTensor]
    tracks: Sequence[Track]

    @classmethod
    def of(cls, tensors: Sequence[PagedTensor], pages: int) -> "_Slot":
        """Returns a slot of `pages` pages, which these tensors have in host memory.
        Raises NoHostMemoryError.
        """
        for tensor in tensors:
            while tensor.host.grow():
                pass
            if tensor.host.failed:
                raise NoHostMemoryError(tensor.host.failed)
        return cls(tensors, [Track.of(tensor, pages) for tensor in tensors])

    def copy(self, pages: Pages, *, loads: bool) -> None:
        """Launch the copy between these pages of the device and the first ones here."""
        for tensor, track in zip(self.tensors, self.tracks, strict=True):
            with on(track.stream):
                page_ids = torch.tensor(pages).to(tensor.device.device)
            track.copy(tensor, page_ids, tuple(range(len(pages))), loads=loads)

    def wait(self) -> None:
        """Wait until all copies are done."""
        for track in self.tracks:
            track.wait()

    def contents(self, first: int, last: int, tensors: slice) -> list[memoryview]:
        """Returns the bytes of pages first .. last - 1 here, of some of the tensors."""
        views = list[memoryview]()
        for tensor in self.tensors[tensors]:
            for start, end in (
                (a, b) for _, a, b in tensor.host.runs((*range(first, last),))
            ):
                run = tensor.host.run(start, end).reshape(-1).view(torch.uint8)
                views.append(run.numpy().data)
        return views


@frozen(eq=False)
class _Piece:
    """Blocks that go through a slot together."""

    slot: _Slot
    blocks: Blocks
    work: "list[Future[None]]" = field(factory=list)  # reads or writes of the store

    @property
    def pages(self) -> Pages:
        """All pages on the device."""
        return flattened([pages for _, pages in self.blocks])


@define(eq=False)
class _KeyedLane:
    """Transfers in one direction."""

    store: KeyedStore
    layout: bytes
    slots: Sequence[_Slot]
    room: int  # pages of a slot
    loads: bool
    pool: ThreadPoolExecutor = field(init=False)
    thread: TransferThread[KeyedCommand] = field(init=False)

    def __attrs_post_init__(self) -> None:
        name = f"minfer-kv-{'fetch' if self.loads else 'save'}"
        self.pool = ThreadPoolExecutor(STORE_THREADS, f"{name}-file")
        self.thread = TransferThread(name, self._perform, (NotStoredError, PeerError))

    def _perform(self, command: KeyedCommand) -> None:
        """Copy all blocks; nothing is written any more when it returns, or raises."""
        begin, pending = time.perf_counter(), deque[_Piece]()
        begin_piece = self._read if self.loads else self._write
        try:
            if not self.loads:
                self.store.check_stores()
            for number, blocks in enumerate(self._pieces(command)):
                if len(pending) == len(self.slots):
                    self._end_piece(pending)
                slot = self.slots[number % len(self.slots)]
                slot.wait()
                pending.append(piece := _Piece(slot, blocks))
                begin_piece(piece)
            while pending:
                self._end_piece(pending)
        finally:
            for piece in pending:
                for future in piece.work:
                    future.cancel()
                wait(piece.work)
            for slot in self.slots:
                slot.wait()
            seconds = time.perf_counter() - begin
            self.store.note(fetches=self.loads, seconds=seconds)

    def _pieces(self, command: KeyedCommand) -> Sequence[Blocks]:
        """Returns the blocks of a transfer, as many at once as a slot has room for."""
        pieces, used = list[list[tuple[Key, Pages]]](), self.room
        for key, pages in zip(command.keys, command.pages, strict=True):
            used += len(pages)
            if used > self.room:
                pieces.append([])
                used = len(pages)
            pieces[-1].append((key, pages))
        return pieces

    def _read(self, piece: _Piece) -> None:
        self._submit(piece, self.store.read)

    def _write(self, piece: _Piece) -> None:
        piece.slot.copy(piece.pages, loads=False)
        piece.slot.wait()
        self._submit(piece, self.store.write)

    def _submit(
        self, piece: _Piece, work: Callable[[Key, bytes, list[memoryview]], None]
    ) -> None:
        first, slices = 0, self.store.slices
        per_slice = len(piece.slot.tensors) // len(slices.own)  # tensors of a slice
        for key, pages in piece.blocks:
            for index, number in enumerate(slices.own):
                tensors = slice(index * per_slice, (index + 1) * per_slice)
                contents = piece.slot.contents(first, first + len(pages), tensors)
                name = slices.key(key, number)
                piece.work.append(self.pool.submit(work, name, self.layout, contents))
            first += len(pages)

    def _end_piece(self, pending: deque[_Piece]) -> None:
        """Wait for the store to have read or written the first piece."""
        # A fetch that lacks a block is over; what can be stored is.
        condition = FIRST_EXCEPTION if self.loads else ALL_COMPLETED
        ended, _ = wait(pending[0].work, return_when=condition)
        for future in ended:
            future.result()
        piece = pending.popleft()
        if self.loads:
            piece.slot.copy(piece.pages, loads=True)

    def close(self) -> None:
        """Perform what has begun, and release the memory."""
        self.thread.close()
        self.pool.shutdown()
        for slot in self.slots:
            for tensor in slot.tensors:
                tensor.host.close()


class KeyedCopier:
    """Performs `StoreBlocks` and `FetchBlocks` over the tensors of the caches."""

    def __init__(
        self,
        make_tensors: Callable[[int, int], Sequence[PagedTensor]],
        store: KeyedStore,
        groups: Sequence[CacheGroup],
    ) -> None:
        """`make_tensors` returns the tensors of the caches, slice by slice, given the
        number of pages in host memory and the number of slices. Raises NoHostMemoryError.
        """
        bundle = max(group.pages for group in groups)
        block_pages = max(group.pages for group in groups if not group.state)
        self.store, self.bundle = store, bundle
        slices = len(store.slices.own)
        tensors = make_tensors(1, slices)
        slice_tensors = tensors[: len(tensors) // slices]
        layout = layout_of(slice_tensors)
        page_bytes = sum(tensor.page_bytes for tensor in slice_tensors)
        self.block_bytes = bundle * page_bytes
        store.open(layout, block_pages * page_bytes)
        room = max(bundle, pages_per_piece(tensors))
        self.lanes = {
            loads: _KeyedLane(
                store,
                layout,
                [
                    _Slot.of(make_tensors(room, slices), room)
                    for _ in range(SLOTS_PER_DIRECTION)
                ],
                room,
                loads,
            )
            for loads in (False, True)
        }

    def move(self, command: KeyedCommand, report: ReportEnd) -> None:
        """Begin a transfer; `report` is called at its end, in another thread."""
        if isinstance(command, FetchBlocks):
            self.lanes[True].thread.begin(command, report)
            return

        def noted(end: Moved | Lost) -> None:
            if isinstance(end, Lost):
                self.store.note(fetches=False, seconds=0.0, dropped=len(command.keys))
            report(end)

        self.lanes[False].thread.begin(command, noted)

    def seconds(self, folder: BlockFolder, blocks: int) -> float:
        """Returns the shortest time of some fetches of `blocks` blocks of the largest
        size from a folder, the store; their pages then have no defined content. They are
        read from the disk itself, as far as the operating system can forget them. Raises
        ConfigError, and BlocksRemovedError.
        """
        keys = tuple([secrets.token_bytes(DIGEST) for _ in range(blocks)])
        pages = (*bundles(tuple(range(blocks * self.bundle)), self.bundle),)
        times = list[float]()
        try:
            self._finish(folder, StoreBlocks(-1, keys, pages))
            for _ in range(REPEATS):
                folder.uncache(keys)
                begin = time.perf_counter()
                self._finish(folder, FetchBlocks(-1, keys, pages))
                times.append(time.perf_counter() - begin)
        finally:
            folder.remove(keys)
            folder.forget_counts()
        return min(times)

    def _finish(self, folder: BlockFolder, command: KeyedCommand) -> None:
        ended, missing = SimpleQueue[Moved | Lost](), folder.totals()[REFUSED + MISSING]
        self.move(command, ended.put)
        if isinstance(end := ended.get(), Lost):
            if folder.totals()[REFUSED + MISSING] > missing:
                raise BlocksRemovedError(end.error)
            raise ConfigError(
                f"kv_disk {folder.path} cannot be used: {end.error}; name another "
                "folder, or make room there"
            )

    def close(self) -> None:
        """Perform what has begun, and release the memory."""
        for lane in self.lanes.values():
            lane.close()
        self.store.close()


def layout_of(tensors: Sequence[PagedTensor]) -> bytes:
    """Returns a digest of how a page of these tensors is stored."""
    description = repr(
        [
            (
                tensor.device.device.type,
                tuple(tensor.device.shape[1:]),
                tensor.device.dtype,
            )
            for tensor in tensors
        ]
    )
    return hashlib.blake2b(description.encode(), digest_size=LAYOUT_BYTES).digest()
