"""The tensors of a cache, page by page, and how pages cross between device and host.

The layers of a page may be apart in the device's cache, and are side by side in host
memory: pages are gathered into a buffer on the device, which crosses the bus whole.
"""

from collections.abc import Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from minfer.blocks.prefix import Pages
from minfer.effects.execution.device.backend import Cache
from minfer.effects.execution.device.streams import new_stream, on
from minfer.effects.execution.tiers.host_pages import HostPages
from minfer.kernels.cache_numbers import as_bytes

# Of a buffer on the device, for all tensors together; or one page.
PIECE_BYTES: Final = 1 << 24
# The dimension of caches, and of their scales, that is key heads, if they keep heads,
# pages being the first.
HEADS_DIM: Final = 4
COPY_DTYPE: Final = torch.int64  # what a cache is copied in


@frozen(eq=False)
class PagedTensor:
    """One tensor of the caches, page by page."""

    device: Tensor  # [pages, ...], a view of the cache, in words where they fit
    host: HostPages

    @classmethod
    def of(cls, tensor: Tensor, pages: int) -> "PagedTensor":
        """Returns a tensor [pages of the device, ...] with `pages` pages in host
        memory.
        """
        line = tensor.shape[-1] * tensor.element_size()
        words = (
            tensor.view(COPY_DTYPE)
            if line % COPY_DTYPE.itemsize == 0
            else as_bytes(tensor)
        )
        shape = tuple(words.shape[1:])
        return cls(words, HostPages(pages, shape, words.dtype, tensor.is_cuda))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.device[0].numel() * self.device.element_size()


def paged_tensors_of(cache: Cache, pages: int, slices: int) -> list[PagedTensor]:
    """Returns the tensors of a cache, with `pages` pages in host memory; in equal slices
    of key heads, one after the other.
    """
    tensors = cache.page_views()
    if slices > 1:  # never of latents
        split = [tensor.chunk(slices, HEADS_DIM) for tensor in tensors]
        tensors = [tensor for group in zip(*split, strict=True) for tensor in group]
    return [PagedTensor.of(tensor, pages) for tensor in tensors]


@frozen(eq=False)
class Track:
    """A buffer on the device, and the stream of what goes through it."""

    buffer: Tensor  # [pages, ...]
    stream: torch.cuda.Stream | None

    @classmethod
    def of(cls, tensor: PagedTensor, pages: int) -> "Track":
        """Returns a buffer of `pages` pages."""
        shape = (pages, *tensor.device.shape[1:])
        return cls(tensor.device.new_empty(shape), new_stream(tensor.device.device))

    def copy(
        self, tensor: PagedTensor, pages: Tensor, on_host: Pages, *, loads: bool
    ) -> None:
        """Launch the copy of a piece between `pages` of the device and of the host."""
        buffer = self.buffer[: len(on_host)]
        with on(self.stream):
            if not loads:
                torch.index_select(tensor.device, 0, pages, out=buffer)
            for offset, first, last in tensor.host.runs(on_host):
                buffered = buffer[offset : offset + last - first]
                host = tensor.host.run(first, last)
                target, source = (buffered, host) if loads else (host, buffered)
                target.copy_(source, non_blocking=True)
            if loads:
                tensor.device.index_copy_(0, pages, buffer)

    def wait(self) -> None:
        """Wait until all copies through the buffer are done."""
        if self.stream is not None:
            self.stream.synchronize()


def pages_per_piece(tensors: Sequence[PagedTensor]) -> int:
    """Returns how many pages fit into `PIECE_BYTES`: one at least."""
    return max(1, PIECE_BYTES // sum(tensor.page_bytes for tensor in tensors))
