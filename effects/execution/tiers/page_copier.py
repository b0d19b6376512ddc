"""Copies KV pages between the device and host memory, beside the steps.

Theory. Neither the pages that a transfer reads nor those that it writes are used by a
step meanwhile (`minfer.records.tiers`), so copies need no order among the steps: there is
a thread for each direction, and on a GPU two streams, each with a buffer on the device. A
page's layers are apart in the device's cache, and side by side in host memory: some pages
are gathered into one buffer while those in the other cross the bus, as a whole (a 7B
model's page of 64 tokens has 3.7 MB). A crossing takes a third of a millisecond at most,
and a step's own copies, which share the bus, wait for one of them.
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
from minfer.effects.execution.device.streams import is_gpu, new_stream, on
from minfer.effects.execution.tiers.host_pages import HostPages
from minfer.kernels.cache_numbers import as_bytes
from minfer.records.messages import Lost, Move, Moved

PIECE: Final = 1 << 24  # bytes of a buffer on the device, of which each part has four
WORD: Final = torch.int64  # what a cache is copied in
REPEATS: Final = 3
Ended = Callable[[Moved | Lost], None]
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
    def of(cls, part: Part) -> "_Track":
        """Returns a buffer of `PIECE` bytes, or of one page."""
        shape = (max(1, PIECE // part.page_bytes), *part.device.shape[1:])
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
    queue: "SimpleQueue[tuple[Move, Ended] | None]" = field(factory=SimpleQueue)
    tracks: list[tuple[_Track, _Track]] = field(factory=list)  # by part
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Allocate buffers and start the thread."""
        self.tracks = [(_Track.of(part), _Track.of(part)) for part in self.parts]
        name = f"minfer-kv-{'load' if self.loads else 'store'}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            move, report = item
            try:
                with torch.inference_mode():
                    for part, tracks in zip(self.parts, self.tracks, strict=True):
                        self._copy(part, tracks, move)
                    for track in chain(*self.tracks):
                        track.wait()
            except Exception as error:
                _log.warning("KV pages could not be copied: %s", error)
                report(Lost(move.number, repr(error)))
            else:
                report(Moved(move.number))

    def _copy(self, part: Part, tracks: tuple[_Track, _Track], move: Move) -> None:
        """Launch the copies of all pages of a part, in pieces, by both tracks in turn."""
        on_host, pages = move.sources, move.targets
        if not self.loads:
            on_host, pages = move.targets, move.sources
        device, size = part.device.device, len(tracks[0].buffer)
        numbers = torch.tensor(pages, pin_memory=is_gpu(device))
        each = list[Tensor]()
        for track in tracks:
            with on(track.stream):
                each.append(numbers.to(device, non_blocking=True))
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
        for part in self.parts:
            part.host.grow()

    def move(self, move: Move, report: Ended) -> None:
        """Begin a transfer; `report` is called at its end, in another thread."""
        self.lanes[move.loads].queue.put((move, report))

    def seconds(self, pages: int) -> float:
        """Returns the shortest time of some loads of so many pages, which then have no
        defined content.
        """
        times, every = list[float](), tuple(range(pages))
        for _ in range(REPEATS):
            ended = SimpleQueue[Moved | Lost]()
            begin = time.perf_counter()
            self.move(Move(-1, True, every, every), ended.put)
            ended.get()
            times.append(time.perf_counter() - begin)
        return min(times)

    def close(self) -> None:
        """End all transfers; the others are lost without a report."""
        for part in self.parts:
            part.host.close()
        for lane in self.lanes.values():
            lane.queue.put(None)
            if lane.thread is not None:
                lane.thread.join()
        self.growing.join()
