"""Copies KV pages between the device and host memory, beside the steps.

Theory. Neither the pages that a transfer reads nor those that it writes are used by a
step meanwhile (`minfer.records.tiers`), so copies need no order among the steps: there is
a thread for each direction, and on a GPU a stream. A page's layers are apart in the
device's cache, and side by side in host memory: pages are gathered into a buffer on the
device, from which whole pages cross the bus (a 7B model's page of 64 tokens has 3.7 MB).
Each crossing is of a few MB, so that a step's own copies, which share the bus, wait for
one of them at most.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from minfer.effects.execution.device.streams import is_gpu, new_event, new_stream, on
from minfer.effects.execution.tiers.host_pages import HostPages
from minfer.kernels.cache_numbers import as_bytes
from minfer.records.messages import Lost, Move, Moved

PIECE: Final = 1 << 23  # bytes of a buffer on the device
REPEATS: Final = 3
Ended = Callable[[Moved | Lost], None]
_log = logging.getLogger("minfer.executor")


@frozen(eq=False)
class Part:
    """One tensor of the caches, page by page."""

    device: Tensor  # [pages, ...], a view of the cache
    host: HostPages

    @classmethod
    def of(cls, tensor: Tensor, dim: int, pages: int) -> "Part":
        """Returns the part of a tensor whose dimension `dim` is pages, with as many
        `pages` in host memory.
        """
        view = as_bytes(tensor).movedim(dim, 0)
        shape = tuple(view.shape[1:])
        return cls(view, HostPages(pages, shape, view.dtype, tensor.is_cuda))


@define(eq=False)
class _Lane:
    """Transfers in one direction: a thread, and on a GPU a stream and buffers."""

    parts: Sequence[Part]
    loads: bool
    queue: "SimpleQueue[tuple[Move, Ended] | None]" = field(factory=SimpleQueue)
    stream: torch.cuda.Stream | None = None
    buffers: list[list[Tensor]] = field(factory=list)  # by part: two
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Allocate buffers and start the thread."""
        device = self.parts[0].device.device
        self.stream = new_stream(device)
        for part in self.parts:
            size = part.device[0].numel() * part.device.element_size()
            shape = (max(1, PIECE // size), *part.device.shape[1:])
            kind = {"dtype": part.device.dtype, "device": device}
            self.buffers.append([torch.empty(shape, **kind) for _ in range(2)])  # type: ignore[call-overload]  # both are right
        name = f"minfer-kv-{'load' if self.loads else 'store'}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            move, report = item
            try:
                with torch.inference_mode(), on(self.stream):
                    for part, buffers in zip(self.parts, self.buffers, strict=True):
                        self._copy(part, buffers, move)
            except Exception as error:
                _log.warning("KV pages could not be copied: %s", error)
                report(Lost(move.number, repr(error)))
            else:
                report(Moved(move.number))

    def _copy(self, part: Part, buffers: list[Tensor], move: Move) -> None:
        """Copy all pages of a part, in pieces, through two buffers in turn."""
        on_host, pages = move.sources, move.targets
        if not self.loads:
            on_host, pages = move.targets, move.sources
        device, size = part.device.device, len(buffers[0])
        numbers = torch.tensor(pages, pin_memory=is_gpu(device))
        every = numbers.to(device, non_blocking=True)
        events = [new_event(device) for _ in buffers]
        for number, first in enumerate(range(0, len(pages), size)):
            event, some = events[number % 2], slice(first, first + size)
            if event is not None and number > 1:
                event.synchronize()  # the buffer is free again
            buffer = buffers[number % 2][: len(pages[some])]
            self._piece(part, every[some], buffer, on_host[some])
            if event is not None:
                event.record(self.stream)
        if self.stream is not None:
            self.stream.synchronize()

    def _piece(
        self, part: Part, pages: Tensor, buffer: Tensor, on_host: tuple[int, ...]
    ) -> None:
        if not self.loads:
            torch.index_select(part.device, 0, pages, out=buffer)
        for at, first, last in part.host.runs(on_host):
            here, there = buffer[at : at + last - first], part.host.run(first, last)
            target, source = (here, there) if self.loads else (there, here)
            target.copy_(source, non_blocking=True)
        if self.loads:
            part.device.index_copy_(0, pages, buffer)


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
