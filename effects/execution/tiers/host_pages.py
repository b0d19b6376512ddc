"""Host memory for KV pages, which is allocated in the background.

For a GPU the memory is pinned, so that copies run at the full rate of the bus. Pinning
takes about a second for some GB, so it is done in segments while the engine runs already:
the engine takes low page numbers first, and copies to pages that are not there yet wait.
"""

import threading
from typing import Final

import torch
from attrs import define, field
from torch import Tensor

from minfer.effects.execution.device.streams import CAPTURE_LOCK

SEGMENT_BYTES: Final = 1 << 28  # bytes that are allocated at once


class NoHostMemoryError(RuntimeError):
    """The operating system gives no more memory for pages."""


@define(eq=False)
class HostPages:
    """Memory for a number of pages, each of the same shape."""

    pages: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    pinned: bool
    segments: list[Tensor] = field(factory=list)  # [pages of a segment, *shape]
    failed: str = ""  # why there is no more
    changed: threading.Condition = field(factory=threading.Condition)
    closed: bool = False

    @property
    def segment_pages(self) -> int:
        """Pages of a segment."""
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        return max(1, SEGMENT_BYTES // max(1, size))

    def grow(self) -> bool:
        """Allocate one more segment; returns whether more are to come."""
        first = len(self.segments) * self.segment_pages
        num_pages = min(self.segment_pages, self.pages - first)
        if num_pages <= 0 or self.closed:
            return False
        try:
            with CAPTURE_LOCK:  # no graph can be captured while memory is pinned
                shape = (num_pages, *self.shape)
                segment = torch.empty(shape, dtype=self.dtype, pin_memory=self.pinned)
        except (MemoryError, RuntimeError) as error:
            self._note(failed=str(error).partition("\n")[0])
            return False
        return self._note(segment) and first + num_pages < self.pages

    def _note(self, segment: Tensor | None = None, failed: str = "") -> bool:
        with self.changed:
            if segment is not None and not self.closed:
                self.segments.append(segment)
            self.failed = failed
            self.changed.notify_all()
            return not self.closed

    def run(self, first: int, last: int) -> Tensor:
        """Returns pages first .. last - 1 of one segment (see `runs`); waits until there
        is memory. Raises NoHostMemoryError.
        """
        if not 0 <= first < last <= self.pages:
            raise NoHostMemoryError(f"KV page {last - 1} is none of {self.pages}")
        segment, offset = divmod(first, self.segment_pages)
        with self.changed:
            while len(self.segments) <= segment and not (self.failed or self.closed):
                self.changed.wait()
            if len(self.segments) <= segment:
                reason = self.failed or "the engine was closed"
                raise NoHostMemoryError(f"no host memory for KV page {first}: {reason}")
            return self.segments[segment][offset : offset + last - first]

    def runs(self, pages: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """Returns consecutive pages among `pages` that are of one segment: the place of
        the first of them, its number, and the number after the last.
        """
        runs, segment_pages = list[tuple[int, int, int]](), self.segment_pages
        for place, page in enumerate(pages):
            if runs and runs[-1][2] == page and page % segment_pages:
                start, first, _ = runs[-1]
                runs[-1] = start, first, page + 1
            else:
                runs.append((place, page, page + 1))
        return runs

    def close(self) -> None:
        """Stop growing, and release the memory."""
        with self.changed:
            self.closed = True
            self.segments.clear()
            self.changed.notify_all()
