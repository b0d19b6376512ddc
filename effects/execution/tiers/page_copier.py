"""Copies KV pages between the device and host memory, beside the steps.

Theory. Neither the pages that a transfer reads nor those that it writes are used by a
step meanwhile (`minfer.records.tiers`), so copies need no order among the steps: there is
a thread for each direction, with two buffers on the device and a stream of each. The
layers of a page are apart in the device's cache, and side by side in host memory: some
pages are gathered into one buffer while those in the other cross the bus whole (a 7B
model's page of 64 tokens has 3.7 MB). A crossing of `PIECE` bytes takes a third of a
millisecond, and a step's own copies, which share the bus, wait for one of them.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from minfer.blocks.prefix import Pages
from minfer.effects.execution.device.streams import new_stream, on
from minfer.effects.execution.tiers.host_pages import HostPages, NoHostMemoryError
from minfer.kernels.cache_numbers import as_bytes
from minfer.records.messages import Lost, Move, Moved

PIECE: Final = 1 << 24  # bytes of a buffer on the device, all parts together; or a page
WORD: Final = torch.int64  # what a cache is copied in
REPEATS: Final = 3
ReportEnd = Callable[[Moved | Lost], None]
_log = logging.getLogger("minfer.executor")


@frozen(eq=False)
class Part:
    """One tensor of the caches, page by page."""

    device: Tensor  # [pages, ...], a view of the cache, in words where they fit
    host: HostPages

    @classmethod
    def of(cls, tensor: Tensor, dim: int, pages: int) -> "Part":
        """Returns the part of a tensor whose dimension `dim` is pages, with as many
        `pages` in host memory.
        """
        line = tensor.shape[-1] * tensor.element_size()
        words = tensor.view(WORD) if line % WORD.itemsize == 0 else as_bytes(tensor)
        view = words.movedim(dim, 0)
        shape = tuple(view.shape[1:])
        return cls(view, HostPages(pages, shape, view.dtype, tensor.is_cuda))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.device[0].numel() * self.device.element_size()


@frozen(eq=False)
class _Track:
    """A buffer on the device, and the stream of what goes through it."""

    buffer: Tensor  # [pages, ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, part: Part, pages: int) -> "_Track":
        """Returns a buffer of so many pages."""
        shape = (pages, *part.device.shape[1:])
        return cls(part.device.new_empty(shape), new_stream(part.device.device))

    def copy(self, part: Part, pages: Tensor, on_host: Pages, *, loads: bool) -> None:
        """Launch the copy of a piece between `pages` of the device and of the host."""
        buffer = self.buffer[: len(on_host)]
        with on(self.stream):
            if not loads:
                torch.index_select(part.device, 0, pages, out=buffer)
            for at, first, last in part.host.runs(on_host):
                here, there = buffer[at : at + last - first], part.host.run(first, last)
                target, source = (here, there) if loads else (there, here)
                target.copy_(source, non_blocking=True)
            if loads:
                part.device.index_copy_(0, pages, buffer)

    def wait(self) -> None:
        """Wait until all copies through the buffer are done."""
        if self.stream is not None:
            self.stream.synchronize()


@define(eq=False)
class _Lane:
    """Transfers in one direction: a thread, and for each part two buffers, so that one is
    filled while the other crosses the bus.
    """

    parts: Sequence[Part]
    loads: bool
    queue: "SimpleQueue[tuple[Move, ReportEnd] | None]" = field(factory=SimpleQueue)
    tracks: list[tuple[_Track, _Track]] = field(factory=list)  # by part
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Allocate buffers and start the thread."""
        pages = max(1, PIECE // sum(part.page_bytes for part in self.parts))
        self.tracks = [
            (_Track.of(part, pages), _Track.of(part, pages)) for part in self.parts
        ]
        name = f"minfer-kv-{'load' if self.loads else 'store'}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            move, report = item
            try:
                with torch.inference_mode():
                    self._perform(move)
            except Exception as error:
                _log.warning("KV pages could not be copied: %s", error)
                report(Lost(move.number, repr(error)))
            else:
                report(Moved(move.number))

    def _perform(self, move: Move) -> None:
        """Copy all pages of all parts; nothing is written any more when it returns, or
        raises.
        """
        try:
            for part, tracks in zip(self.parts, self.tracks, strict=True):
                self._copy(part, tracks, move)
        finally:
            for track in chain(*self.tracks):
                track.wait()

    def _copy(self, part: Part, tracks: tuple[_Track, _Track], move: Move) -> None:
        """Launch the copies of all pages of a part, in pieces, by both tracks in turn."""
        on_host, pages = move.sources, move.targets
        if not self.loads:
            on_host, pages = move.targets, move.sources
        size, each = len(tracks[0].buffer), list[Tensor]()
        for track in tracks:
            with on(track.stream):
                # Not pinned: memory cannot be pinned while a graph is captured.
                each.append(torch.tensor(pages).to(part.device.device))
        for number, first in enumerate(range(0, len(pages), size)):
            at, some = number % 2, slice(first, first + size)
            tracks[at].copy(part, each[at][some], on_host[some], loads=self.loads)


class PageCopier:
    """Performs `Move`s over the parts of the caches."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.lanes = {loads: _Lane(parts, loads) for loads in (False, True)}
        for lane in self.lanes.values():
            lane.start()
        self.growing = threading.Thread(
            target=self._grow, name="minfer-kv-pages", daemon=True
        )
        self.growing.start()

    def _grow(self) -> None:
        growing = [part.host for part in self.parts]
        while growing:  # segment by segment, so that first pages are whole first
            growing = [host for host in growing if host.grow()]

    def move(self, move: Move, report: ReportEnd) -> None:
        """Begin a transfer; `report` is called at its end, in another thread."""
        self.lanes[move.loads].queue.put((move, report))

    def seconds(self, pages: int) -> float:
        """Returns the shortest time of some loads of so many pages, which then have no
        defined content. Raises NoHostMemoryError.
        """
        times, every = list[float](), tuple(range(pages))
        for _ in range(REPEATS):
            ended = SimpleQueue[Moved | Lost]()
            begin = time.perf_counter()
            self.move(Move(-1, True, every, every), ended.put)
            if isinstance(end := ended.get(), Lost):
                raise NoHostMemoryError(end.error)
            times.append(time.perf_counter() - begin)
        return min(times)

    def close(self) -> None:
        """End all transfers: those that wait for memory are reported as lost."""
        for part in self.parts:
            part.host.close()
        for lane in self.lanes.values():
            lane.queue.put(None)
            if lane.thread is not None:
                lane.thread.join()
        self.growing.join()
