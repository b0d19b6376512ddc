"""The Triton kernels of mla.py, which has their theory, and launches them.

`attend_latent` folds the tiles of its program's range of a context into a running softmax
(`_scan`), and stores the result; or, if the context is cut, leaves it for `merge_ranges`,
which is launched after it.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.attention_kernels import NOTHING_YET, chunk_of, token_of
from minfer.kernels.pdl import follow


class LatentPages(NamedTuple):
    """The pages of a sequence."""

    last: tl.tensor  # the last key that may be read
    cache: tl.tensor
    blocks: tl.tensor  # pointer to the sequence's row of the block table
    stride_block: tl.tensor
    stride_token: tl.tensor


@triton.jit
def _block_ids(pages, index, block_size: tl.constexpr, tile: tl.constexpr):
    """The blocks of the keys of tile `index`: [tile], or one if it is within a block."""
    tokens = index * tile
    if block_size % tile > 0:
        tokens += tl.arange(0, tile)
    pointers = pages.blocks + tokens // block_size
    return tl.load(pointers, mask=tokens <= pages.last, other=0)


@triton.jit
def _offsets(pages, ids, index, block_size: tl.constexpr, tile: tl.constexpr):
    """[tile]: where the keys of a tile are in the cache."""
    offsets = ids.to(tl.int64) * pages.stride_block
    lanes = tl.arange(0, tile)
    if block_size % tile > 0:
        return offsets + (index * tile + lanes) % block_size * pages.stride_token
    offsets += index * tile % block_size * pages.stride_token
    return offsets + lanes * pages.stride_token


@triton.jit
def _rotated(
    pages,
    offsets,
    index,
    tile: tl.constexpr,
    latent: tl.constexpr,
    rotated: tl.constexpr,
    rotated_pad: tl.constexpr,
):
    """[tile, rotated_pad]: the rotated keys of a tile."""
    dims = tl.arange(0, rotated_pad)
    tokens = index * tile + tl.arange(0, tile)
    mask = (tokens <= pages.last)[:, None] & (dims < rotated)[None, :]
    place = pages.cache + offsets[:, None] + latent + dims[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def _first_broken(
    pages,
    first,
    block_size: tl.constexpr,
    latent: tl.constexpr,
    latent_pad: tl.constexpr,
):
    """The first position from `first` on whose latent is not finite; without, one that no
    context has.
    """
    tile: tl.constexpr = 16  # latents that are checked at once
    never: tl.constexpr = 2**31 - 1
    dims = tl.arange(0, latent_pad)
    position = never
    for index in range(first // tile, pages.last // tile + 1):
        tokens = index * tile + tl.arange(0, tile)
        ids = _block_ids(pages, index, block_size, tile)
        offsets = _offsets(pages, ids, index, block_size, tile)
        is_checked = (tokens >= first) & (tokens <= pages.last)
        mask = is_checked[:, None] & (dims < latent)[None, :]
        place = pages.cache + offsets[:, None] + dims[None, :]
        values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        broken = tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1), 1) > 0
        position = tl.minimum(position, tl.min(tl.where(broken, tokens, never), 0))
    return position


@triton.jit
def _scan(
    q_latent,
    q_rotated,
    positions,
    lo,
    hi,
    pages,
    scale,
    rows: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    latent: tl.constexpr,
    latent_pad: tl.constexpr,
    rotated: tl.constexpr,
    rotated_pad: tl.constexpr,
):
    """Fold tiles lo .. hi - 1 of the keys into a softmax of q's rows, of which row r is
    at positions[r]; returns its weighted values, largest scores times log2(e), and sums
    of exponentials.

    Scores are [rows, tile], weighted values [rows, latent_pad]. (With keys as the first
    operand of the products, Triton 3.6's machine code was wrong on an H100.)
    """
    dims = tl.arange(0, latent_pad)
    acc = tl.zeros([rows, latent_pad], tl.float32)
    # It starts at a finite number, so a row that sees no key yet has no inf - inf.
    top = tl.full([rows], NOTHING_YET, tl.float32)
    total = tl.zeros([rows], tl.float32)
    # Block ids and rotated keys are loaded to registers, a tile ahead. Triton would hold
    # rotated keys in shared memory, as latents, for as many tiles; three do not fit.
    offsets = _offsets(
        pages, _block_ids(pages, lo, block_size, tile), lo, block_size, tile
    )
    next_rotated = _rotated(pages, offsets, lo, tile, latent, rotated, rotated_pad)
    ids = _block_ids(pages, lo + 1, block_size, tile)
    for index in range(lo, hi):
        tokens = index * tile + tl.arange(0, tile)
        latents = tl.load(
            pages.cache + offsets[:, None] + dims[None, :],
            mask=(tokens <= pages.last)[:, None] & (dims < latent)[None, :],
            other=0.0,
        )
        rotated_keys = next_rotated.to(q_rotated.dtype)
        latents = latents.to(q_latent.dtype)
        offsets = _offsets(pages, ids, index + 1, block_size, tile)
        next_rotated = _rotated(
            pages, offsets, index + 1, tile, latent, rotated, rotated_pad
        )
        ids = _block_ids(pages, index + 2, block_size, tile)
        scores = tl.dot(q_rotated, tl.trans(rotated_keys), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
        visible = tokens[None, :] <= positions[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        weights = weights.to(latents.dtype)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights, latents, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


# Rows without drafts in the step may begin anywhere among its rows.
@triton.jit(
    do_not_specialize=["splits", "skip", "stride", "max_count"],
    do_not_specialize_on_alignment=["rows", "starts", "counts", "offsets"],
)
def attend_latent(
    q,
    cache,
    table,
    rows,
    starts,
    counts,
    offsets,
    out,
    partials,
    sums,
    scale,
    splits,
    skip,
    stride,
    max_count,
    q_row,
    q_head,
    out_row,
    out_head,
    table_row,
    stride_block,
    stride_token: tl.constexpr,
    split: tl.constexpr,
    heads: tl.constexpr,
    rows_tile: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    latent: tl.constexpr,
    latent_pad: tl.constexpr,
    rotated: tl.constexpr,
    rotated_pad: tl.constexpr,
    drafted: tl.constexpr,
):
    """Grid [tiles of rows * splits, chunks]; without counts, the starts are contexts.
    `drafted`: queries are laid out by skip and stride, and each chunk has `max_count`, of
    which those after its count get finite results.

    With `split`, results are stored in `partials` [tokens, heads, splits, latent], and
    the logarithms of their sums of exponentials in `sums` [tokens, heads, splits].
    """
    follow()
    range_index = tl.program_id(0) % splits
    chunk = tl.program_id(1)
    start, count, offset = chunk_of(starts, counts, offsets, chunk)
    queries = max_count if drafted else count
    # The last rows of a chunk see the most keys: they are launched first, so that shorter
    # programs fill the end.
    index = tl.cdiv(queries * heads, rows_tile) - 1 - tl.program_id(0) // splits
    if index < 0:
        return
    flat = index * rows_tile + tl.arange(0, rows_tile)
    query = flat * 0 if counts is None else flat // heads
    token = token_of(offset, query, skip, stride, drafted)
    head = flat - query * heads
    positions = start + query
    row_mask = flat < queries * heads
    result_index = (token * heads + head) * splits + range_index
    last = start + tl.minimum((index * rows_tile + rows_tile - 1) // heads, count - 1)
    lo = 0
    hi = tl.cdiv(last + 1, tile)
    if split:
        share = tl.maximum(tl.cdiv(hi, splits), 1)
        lo = range_index * share
        if lo >= hi:
            tl.store(sums + result_index, float("-inf"), mask=row_mask)
            return
        hi = tl.minimum(lo + share, hi)

    dims = tl.arange(0, latent_pad)
    rotated_dims = tl.arange(0, rotated_pad)
    query_mask = (flat < count * heads)[:, None]
    place = q + (token * q_row + head * q_head)[:, None]
    q_latent = tl.load(
        place + dims[None, :], mask=query_mask & (dims < latent)[None, :], other=0.0
    )
    q_rotated = tl.load(
        place + latent + rotated_dims[None, :],
        mask=query_mask & (rotated_dims < rotated)[None, :],
        other=0.0,
    )
    blocks = table + tl.load(rows + chunk).to(tl.int64) * table_row
    read = tl.minimum(last, hi * tile - 1)
    pages = LatentPages(read, cache, blocks, stride_block, stride_token)
    if drafted:
        # A rejected draft's latent may not be finite, and 0 times it would be NaN for
        # queries before it. Those that see it get NaN, and it is not read again.
        first = tl.maximum(start + 1, lo * tile)
        broken = _first_broken(pages, first, block_size, latent, latent_pad)
        read = tl.minimum(read, broken - 1)
        pages = LatentPages(read, cache, blocks, stride_block, stride_token)
    acc, top, total = _scan(
        q_latent,
        q_rotated,
        positions,
        lo,
        hi,
        pages,
        scale,
        rows_tile,
        block_size,
        tile,
        latent,
        latent_pad,
        rotated,
        rotated_pad,
    )
    if drafted:
        total = tl.where((positions >= broken) & (query < count), float("nan"), total)

    # Compared with 0, so that NaN stays.
    divisor = tl.where(total == 0, 1.0, total)
    result = acc / divisor[:, None]
    valid = row_mask[:, None] & (dims < latent)[None, :]
    if split:
        logs = tl.where(total == 0, float("-inf"), top + tl.log2(divisor))
        tl.store(sums + result_index, logs, mask=row_mask)
        tl.store(
            partials + result_index[:, None] * latent + dims[None, :], result, mask=valid
        )
    else:
        out_pointers = (
            out + token[:, None] * out_row + head[:, None] * out_head + dims[None, :]
        )
        tl.store(out_pointers, result.to(out.dtype.element_ty), mask=valid)


@triton.jit(
    do_not_specialize=["splits", "skip", "stride", "max_count"],
    do_not_specialize_on_alignment=["starts", "counts", "offsets"],
)
def merge_ranges(
    partials,
    sums,
    starts,
    counts,
    offsets,
    out,
    splits,
    skip,
    stride,
    max_count,
    out_row,
    out_head,
    heads: tl.constexpr,
    latent: tl.constexpr,
    piece: tl.constexpr,
    splits_pad: tl.constexpr,
    drafted: tl.constexpr,
):
    """Grid [rows of a chunk, pieces of `piece` dimensions, chunks]: average the results
    of a row's ranges, as `attend_latent` left them.
    """
    follow()
    row = tl.program_id(0)
    _, count, offset = chunk_of(starts, counts, offsets, tl.program_id(2))
    query = row // heads
    if query >= (max_count if drafted else count):
        return
    token = token_of(offset, query, skip, stride, drafted)
    head = row % heads
    range_index = tl.arange(0, splits_pad)
    result_index = (token * heads + head) * splits + range_index
    dims = tl.program_id(1) * piece + tl.arange(0, piece)
    logs = tl.load(sums + result_index, mask=range_index < splits, other=float("-inf"))
    # Compared with -inf, so that NaN stays. Results of no tile were not written.
    used = logs != float("-inf")
    results = tl.load(
        partials + result_index[:, None] * latent + dims[None, :],
        mask=used[:, None] & (dims < latent)[None, :],
        other=0.0,
    )
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), NOTHING_YET))
    total = tl.sum(weights, 0)
    merged = tl.sum(weights[:, None] * results, 0) / tl.where(total == 0, 1.0, total)
    place = out + token * out_row + head * out_head + dims
    tl.store(place, merged.to(out.dtype.element_ty), mask=dims < latent)
