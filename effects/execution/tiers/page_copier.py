"""Copies KV pages between the device and host memory, beside the steps.

Theory. Neither the pages that a transfer reads nor those that it writes are used by a
step meanwhile (`minfer.records.tiers`), so copies need no order among the steps. There is
a thread for each direction, with two buffers on the device and a stream for each of
these: some pages are gathered into one buffer while those in the other cross the bus
whole (a 7B model's page of 64 tokens has 3.7 MB). A crossing of `PIECE_BYTES` takes a
third of a millisecond, and a step's own copies, which share the bus, wait for one.
"""

import threading
import time
from collections.abc import Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Final

import torch
from attrs import define, field
from torch import Tensor

from minfer.effects.execution.device.streams import on
from minfer.effects.execution.tiers.host_pages import NoHostMemoryError
from minfer.effects.execution.tiers.paged_tensors import (
    PagedTensor,
    Track,
    pages_per_piece,
)
from minfer.effects.execution.tiers.transfer_thread import ReportEnd, TransferThread
from minfer.records.messages import Lost, Move, Moved
from minfer.records.tiers import TransferKind

REPEATS: Final = 3


@define(eq=False)
class _PageLane:
    """Transfers in one direction: a thread, and for each tensor two buffers, so that one
    is filled while the other crosses the bus.
    """

    tensors: Sequence[PagedTensor]
    kind: TransferKind
    tracks: list[tuple[Track, Track]] = field(init=False)  # by tensor
    thread: TransferThread[Move] = field(init=False)

    def __attrs_post_init__(self) -> None:
        pages = pages_per_piece(self.tensors)
        self.tracks = [
            (Track.of(tensor, pages), Track.of(tensor, pages)) for tensor in self.tensors
        ]
        name = f"minfer-kv-{'load' if self.kind.to_device else 'store'}"
        self.thread = TransferThread(name, self._perform)

    def _perform(self, move: Move) -> None:
        """Copy all pages of all tensors; nothing is written any more when it returns, or
        raises.
        """
        try:
            for tensor, tracks in zip(self.tensors, self.tracks, strict=True):
                self._copy(tensor, tracks, move)
        finally:
            for track in chain(*self.tracks):
                track.wait()

    def _copy(self, tensor: PagedTensor, tracks: tuple[Track, Track], move: Move) -> None:
        """Launch the copies of all pages of a tensor, in pieces, by both tracks in
        turn.
        """
        on_host, pages = move.sources, move.targets
        if not self.kind.to_device:
            on_host, pages = move.targets, move.sources
        size, page_ids = len(tracks[0].buffer), list[Tensor]()
        for track in tracks:
            with on(track.stream):
                # Not pinned: memory cannot be pinned while a graph is captured.
                page_ids.append(torch.tensor(pages).to(tensor.device.device))
        for number, first in enumerate(range(0, len(pages), size)):
            turn, span = number % 2, slice(first, first + size)
            tracks[turn].copy(
                tensor, page_ids[turn][span], on_host[span], loads=self.kind.to_device
            )


class PageCopier:
    """Performs `Move`s over the tensors of the caches."""

    def __init__(self, tensors: Sequence[PagedTensor]) -> None:
        self.tensors = tensors
        kinds = TransferKind.STORE_TO_HOST, TransferKind.LOAD_FROM_HOST
        self.lanes = {kind: _PageLane(tensors, kind) for kind in kinds}
        self.growing = threading.Thread(
            target=self._grow, name="minfer-kv-pages", daemon=True
        )
        self.growing.start()

    def _grow(self) -> None:
        growing = [tensor.host for tensor in self.tensors]
        while growing:  # segment by segment, so that first pages are whole first
            growing = [host for host in growing if host.grow()]

    def move(self, move: Move, report: ReportEnd) -> None:
        """Begin a transfer; `report` is called at its end, in another thread."""
        self.lanes[move.kind].thread.begin(move, report)

    def seconds(self, pages: int) -> float:
        """Returns the shortest time of some loads of `pages` pages, which then have no
        defined content. Raises NoHostMemoryError.
        """
        times, page_ids = list[float](), tuple(range(pages))
        for _ in range(REPEATS):
            ended = SimpleQueue[Moved | Lost]()
            begin = time.perf_counter()
            move = Move(-1, TransferKind.LOAD_FROM_HOST, page_ids, page_ids)
            self.move(move, ended.put)
            if isinstance(end := ended.get(), Lost):
                raise NoHostMemoryError(end.error)
            times.append(time.perf_counter() - begin)
        return min(times)

    def close(self) -> None:
        """End all transfers: those that wait for memory are reported as lost."""
        for tensor in self.tensors:
            tensor.host.close()
        for lane in self.lanes.values():
            lane.thread.close()
        self.growing.join()
