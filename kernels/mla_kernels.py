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
    at = pages.blocks + tokens // block_size
    return tl.load(at, mask=tokens <= pages.last, other=0)


@triton.jit
def _offsets(pages, ids, index, block_size: tl.constexpr, tile: tl.constexpr):
    """[tile]: where the keys of a tile are in the cache."""
    at = ids.to(tl.int64) * pages.stride_block
    lanes = tl.arange(0, tile)
    if block_size % tile > 0:
        return at + (index * tile + lanes) % block_size * pages.stride_token
    at += index * tile % block_size * pages.stride_token
    return at + lanes * pages.stride_token


@triton.jit
def _rotated(
    pages,
    at,
    index,
    tile: tl.constexpr,
    latent: tl.constexpr,
    rotated: tl.constexpr,
    rotated_pad: tl.constexpr,
):
    """[tile, rotated_pad]: the rotated keys of a tile."""
    dims = tl.arange(0, rotated_pad)
    tokens = index * tile + tl.arange(0, tile)
    inside = (tokens <= pages.last)[:, None] & (dims < rotated)[None, :]
    place = pages.cache + at[:, None] + latent + dims[None, :]
    return tl.load(place, mask=inside, other=0.0)


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
        at = _offsets(pages, ids, index, block_size, tile)
        inside = (tokens >= first) & (tokens <= pages.last)
        here = inside[:, None] & (dims < latent)[None, :]
        place = pages.cache + at[:, None] + dims[None, :]
        found = tl.load(place, mask=here, other=0.0).to(tl.float32)
        broken = tl.max(tl.where(tl.abs(found) < float("inf"), 0, 1), 1) > 0
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
    at = _offsets(pages, _block_ids(pages, lo, block_size, tile), lo, block_size, tile)
    turned = _rotated(pages, at, lo, tile, latent, rotated, rotated_pad)
    ids = _block_ids(pages, lo + 1, block_size, tile)
    for index in range(lo, hi):
        tokens = index * tile + tl.arange(0, tile)
        latents = tl.load(
            pages.cache + at[:, None] + dims[None, :],
            mask=(tokens <= pages.last)[:, None] & (dims < latent)[None, :],
            other=0.0,
        )
        rotated_keys = turned.to(q_rotated.dtype)
        latents = latents.to(q_latent.dtype)
        at = _offsets(pages, ids, index + 1, block_size, tile)
        turned = _rotated(pages, at, index + 1, tile, latent, rotated, rotated_pad)
        ids = _block_ids(pages, index + 2, block_size, tile)
        scores = tl.dot(q_rotated, tl.trans(rotated_keys), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")
        seen = tokens[None, :] <= positions[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        weights = weights.to(latents.dtype)
        acc = acc * fade[:, None]
        acc = tl.dot(weights, latents, acc, input_precision="ieee")
        top = higher
    return acc, top, total


# Rows without drafts in the step may begin anywhere among its rows.
@triton.jit(
    do_not_specialize=["splits", "skip", "stride", "most"],
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
    parts,
    sums,
    scale,
    splits,
    skip,
    stride,
    most,
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
    `drafted`: queries are laid out by skip and stride, and each chunk has `most`, of
    which those after its count get finite results.

    With `split`, results are stored in `parts` [tokens, heads, splits, latent], and the
    logarithms of their sums of exponentials in `sums` [tokens, heads, splits].
    """
    follow()
    part = tl.program_id(0) % splits
    chunk = tl.program_id(1)
    start, count, offset = chunk_of(starts, counts, offsets, chunk)
    queries = most if drafted else count
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
    ours = flat < queries * heads
    here = (token * heads + head) * splits + part
    last = start + tl.minimum((index * rows_tile + rows_tile - 1) // heads, count - 1)
    lo = 0
    hi = tl.cdiv(last + 1, tile)
    if split:
        share = tl.maximum(tl.cdiv(hi, splits), 1)
        lo = part * share
        if lo >= hi:
            tl.store(sums + here, float("-inf"), mask=ours)
            return
        hi = tl.minimum(lo + share, hi)

    dims = tl.arange(0, latent_pad)
    more = tl.arange(0, rotated_pad)
    there = (flat < count * heads)[:, None]
    place = q + (token * q_row + head * q_head)[:, None]
    q_latent = tl.load(
        place + dims[None, :], mask=there & (dims < latent)[None, :], other=0.0
    )
    q_rotated = tl.load(
        place + latent + more[None, :], mask=there & (more < rotated)[None, :], other=0.0
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
    some = tl.where(total == 0, 1.0, total)
    result = acc / some[:, None]
    valid = ours[:, None] & (dims < latent)[None, :]
    if split:
        logs = tl.where(total == 0, float("-inf"), top + tl.log2(some))
        tl.store(sums + here, logs, mask=ours)
        tl.store(parts + here[:, None] * latent + dims[None, :], result, mask=valid)
    else:
        where = out + token[:, None] * out_row + head[:, None] * out_head + dims[None, :]
        tl.store(where, result.to(out.dtype.element_ty), mask=valid)


@triton.jit(
    do_not_specialize=["splits", "skip", "stride", "most"],
    do_not_specialize_on_alignment=["starts", "counts", "offsets"],
)
def merge_ranges(
    parts,
    sums,
    starts,
    counts,
    offsets,
    out,
    splits,
    skip,
    stride,
    most,
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
    if query >= (most if drafted else count):
        return
    token = token_of(offset, query, skip, stride, drafted)
    head = row % heads
    part = tl.arange(0, splits_pad)
    at = (token * heads + head) * splits + part
    dims = tl.program_id(1) * piece + tl.arange(0, piece)
    logs = tl.load(sums + at, mask=part < splits, other=float("-inf"))
    # Compared with -inf, so that NaN stays. Results of no tile were not written.
    used = logs != float("-inf")
    found = tl.load(
        parts + at[:, None] * latent + dims[None, :],
        mask=used[:, None] & (dims < latent)[None, :],
        other=0.0,
    )
    weights = tl.exp2(logs - tl.maximum(tl.max(logs, 0), NOTHING_YET))
    total = tl.sum(weights, 0)
    merged = tl.sum(weights[:, None] * found, 0) / tl.where(total == 0, 1.0, total)
    place = out + token * out_row + head * out_head + dims
    tl.store(place, merged.to(out.dtype.element_ty), mask=dims < latent)
