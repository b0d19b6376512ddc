"""The CPU's cache of one layer: what is stored of tokens, and what attention reads."""

import torch
from attrs import frozen
from torch import Tensor

from minfer.kernels.cache_numbers import as_bytes, dequantize, write


@frozen(eq=False)
class LayerCache:
    """Blocks of one layer. Numbers of 8 bits are dequantized as they are read."""

    stored: Tensor  # [pages, block_size, *token]
    scales: Tensor | None  # of INT8: [pages, block_size, *token but the last]
    dtype: torch.dtype  # of what is read
    # Views of `stored`, as bytes if it has 8 bits: [pages * block_size, a token's
    # elements], if pages are side by side; and [pages, a block's elements], or, if layers
    # share their place, [pages, block_size, a token's elements].
    slots: Tensor | None
    blocks: Tensor

    @classmethod
    def of(
        cls, stored: Tensor, dtype: torch.dtype, scales: Tensor | None = None
    ) -> "LayerCache":
        """Returns the cache of a tensor, whose tokens are contiguous."""
        plain, tokens = as_bytes(stored), as_bytes(stored).flatten(2)
        are_side_by_side = tokens.stride(0) == tokens.shape[1] * tokens.stride(1)
        slots = tokens.flatten(0, 1) if are_side_by_side else None
        is_whole = tokens.stride(1) == tokens.shape[2]
        return cls(stored, scales, dtype, slots, plain.flatten(1) if is_whole else tokens)

    def write(self, slots: Tensor, new: Tensor) -> None:
        """Store `new` [tokens, *token], in the dtype of reads, in slots [tokens]. With 8
        bits, `new` becomes what a read gives.
        """
        if self.stored.itemsize > 1 and self.slots is not None:
            self.slots.index_copy_(0, slots, new.flatten(1))
            return
        numbers, scales = write(self.stored, self.scales, slots, new)
        if self.stored.itemsize == 1:
            new.copy_(dequantize(numbers, scales, new.dtype))

    def read(self, blocks: Tensor | slice) -> Tensor:
        """Returns some blocks [blocks, a block's elements]."""
        data = _select_blocks(self.blocks, blocks).contiguous().flatten(1)
        if self.stored.itemsize > 1:
            return data
        numbers = data.view(self.stored.dtype).view(-1, *self.stored.shape[1:])
        scales = None if self.scales is None else _select_blocks(self.scales, blocks)
        return dequantize(numbers, scales, self.dtype).flatten(1)


def _select_blocks(blocks: Tensor, index: Tensor | slice) -> Tensor:
    if isinstance(index, slice):
        return blocks[index]
    return blocks.index_select(0, index)
