"""Parts that the kernels of recurrent layers share."""

import triton
import triton.language as tl


@triton.jit
def unit_pointers(
    pages, page_stride, table, first_page, unit, per_page, size: tl.constexpr, mask
):
    """Pointers to units of `size` elements of a row, whose line of the table is at
    `table`; `unit` counts from the first unit of all layers.
    """
    page = tl.load(table + first_page + unit // per_page, mask=mask)
    return pages + page.to(tl.int64) * page_stride + (unit % per_page) * size


@triton.jit
def find_block(counts, chunks, number, block: tl.constexpr, pad: tl.constexpr):
    """Find a block of up to `block` inputs of a chunk. Blocks are numbered over all
    chunks. Returns the chunk, which is `chunks` or more if there is no such block, and
    the number of the block within it.
    """
    lane = tl.arange(0, pad)
    blocks = tl.cdiv(tl.load(counts + lane, mask=lane < chunks, other=0), block)
    is_before = tl.cumsum(blocks, 0) <= number
    chunk = tl.sum(is_before.to(tl.int32), 0)
    return chunk, number - tl.sum(tl.where(is_before, blocks, 0), 0)


@triton.jit
def first_block(counts, chunk, block: tl.constexpr, pad: tl.constexpr):
    """The number of a chunk's first block, as `find_block` counts them."""
    lane = tl.arange(0, pad)
    blocks = tl.cdiv(tl.load(counts + lane, mask=lane < chunk, other=0), block)
    return tl.sum(blocks, 0)


def most_blocks(tokens: int, chunks: int, block: int) -> int:
    """Returns the largest possible number of blocks of the chunks of a step."""
    return tokens // block + chunks
