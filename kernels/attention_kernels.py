"""The Triton kernel of paged attention; attention.py has its theory, and launches it.

`attend` is the kernel. Each program finds its range of a context and folds the tiles of
that range into a running softmax (`_scan`). It stores the result; or, if the context is
split into several ranges, the program that ends last merges their results (`_merge`).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.pdl import arrive, follow

MINUS_TWO_LOG2_E = tl.constexpr(-2 * math.log2(math.e))
NOTHING_YET = tl.constexpr(-1e30)  # the initial maximum: finite, below every score


class HeadPages(NamedTuple):
    """The pages of one key head of a sequence."""

    # the last key that every query sees; after it may be rejected drafts
    accepted_until: tl.tensor
    k_head: tl.tensor  # pointers to the head in block 0
    v_head: tl.tensor
    blocks: tl.tensor  # pointer to the sequence's row of the block table
    stride_block: tl.tensor
    stride_token: tl.tensor
    # Pointers to the head's scales in block 0; unused copies of those above if there are
    # no scales.
    k_scale: tl.tensor
    v_scale: tl.tensor
    heads: tl.tensor  # key heads: scales of a token


class Softmax(NamedTuple):
    """A running softmax of rows over a part of a context, not yet divided."""

    acc: tl.tensor  # [rows, dim_pad] weighted values
    top: tl.tensor  # [rows] largest score, times log2(e)
    total: tl.tensor  # [rows] sum of exponentials


@triton.jit
def _finite(values, accepted):
    """Values, or their scales, with 0 for those of drafts that are not finite: a rejected
    draft has weight 0, and 0 times infinity or NaN would be NaN.
    """
    usable = accepted | (tl.abs(values) < float("inf"))
    return tl.where(usable, values, 0.0)


@triton.jit
def _scores(q, unit, key, k_scale):
    """Scores [rows, tile] of queries, which were divided by `unit` [rows], and keys with
    scales `k_scale` [tile]; either may be None.
    """
    scores = tl.dot(q, tl.trans(key), input_precision="ieee")
    if k_scale is not None:
        scores = scores * k_scale[None, :]
    if unit is not None:
        scores = scores * unit[:, None]
    return scores


@triton.jit
def tanh(x):
    """tanh by an exponential that does not overflow; NaN stays NaN."""
    small = tl.exp2(tl.abs(x) * MINUS_TWO_LOG2_E)
    size = (1 - small) / (1 + small)
    return tl.where(x < 0, -size, size)


@triton.jit
def _first_visible(position, window: tl.constexpr, chunked: tl.constexpr):
    """The first key that a query at `position` attends to: of its window, or, with
    `chunked`, of the chunk of `window` positions that it is in.
    """
    if chunked:
        return tl.maximum(position // window * window, 0)
    return tl.maximum(position - window + 1, 0)


@triton.jit
def _visible(tokens, positions, window: tl.constexpr, chunked: tl.constexpr):
    """Which keys `tokens` [tile] the queries at `positions` [rows] attend to."""
    visible = tokens[None, :] <= positions[:, None]
    if chunked:
        first_visible = _first_visible(positions, window, chunked)
        visible = visible & (tokens[None, :] >= first_visible[:, None])
    elif window > 0:
        visible = visible & (tokens[None, :] > positions[:, None] - window)
    return visible


@triton.jit
def _scan(
    q,
    unit,
    softmax,
    positions,
    lo,
    hi,
    first_key,
    last_key,
    context,
    scale,
    cap_scale,
    window: tl.constexpr,
    chunked: tl.constexpr,
    masked: tl.constexpr,
    drafted: tl.constexpr,
    scaled: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
):
    """Fold tiles lo .. hi - 1 of one key head into the softmax of q's rows.

    q is [rows, dim_pad]; row r is at positions[r]. Only the keys first_key to last_key
    and their table entries are loaded. Without `masked`, every row sees every key of
    these tiles. `drafted`: queries are drafts to verify. `scaled`: keys and values have
    scales. Keys and values of 8 bits are converted to the dtype of q, which is exact. q
    was divided by `unit` [rows], unless that is None. cap_scale: scores are tanh of
    themselves times this, before `scale` multiplies them; None: they are not.
    """
    acc, top, total = softmax
    lanes = tl.arange(0, tile)
    dims = tl.arange(0, dim_pad)
    tokens = lo * tile + lanes
    in_range = (tokens >= first_key) & (tokens <= last_key)
    ids = tl.load(context.blocks + tokens // block_size, mask=in_range, other=0)
    for index in range(lo, hi):
        tokens = index * tile + lanes
        token_offsets = ids.to(tl.int64) * context.stride_block
        token_offsets += (tokens % block_size) * context.stride_token
        if scaled:
            scale_index = ids.to(tl.int64) * block_size + tokens % block_size
        # The next tile's block ids are loaded while this tile's keys are in flight: if
        # they were loaded where they are used, every tile would wait for two loads in
        # sequence.
        next_tokens = tokens + tile
        in_range = (next_tokens >= first_key) & (next_tokens <= last_key)
        ids = tl.load(context.blocks + next_tokens // block_size, mask=in_range, other=0)
        offsets = token_offsets[:, None] + dims[None, :]
        mask = (dims < dim)[None, :]
        if masked:
            mask = mask & ((tokens >= first_key) & (tokens <= last_key))[:, None]
        key = tl.load(context.k_head + offsets, mask=mask, other=0.0)
        value = tl.load(context.v_head + offsets, mask=mask, other=0.0)
        if scaled:
            scale_mask = (tokens >= first_key) & (tokens <= last_key)
            k_scale = tl.load(
                context.k_scale + scale_index * context.heads, mask=scale_mask, other=0.0
            )
            v_scale = tl.load(
                context.v_scale + scale_index * context.heads, mask=scale_mask, other=0.0
            )
        if key.dtype != q.dtype:
            key = key.to(q.dtype)
            value = value.to(q.dtype)
        scores = _scores(q, unit, key, k_scale if scaled else None)
        if cap_scale is not None:
            scores = tanh(scores * cap_scale)
        if masked:
            visible = _visible(tokens, positions, window, chunked)
            scores = tl.where(visible, scores, float("-inf"))
            if drafted:
                accepted = tokens <= context.accepted_until
                value = _finite(value, accepted[:, None])
                if scaled:
                    v_scale = _finite(v_scale, accepted)
        # `top` starts at a finite number, so a row that sees no key yet has no inf - inf.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        if scaled:
            weights = weights * v_scale[None, :]
        weights = weights.to(value.dtype)
        acc = tl.dot(weights, value, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return Softmax(acc, top, total)


@triton.jit
def _merge(
    partials,
    sums,
    first_index,
    valid,
    used,
    rows: tl.constexpr,
    depth: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
):
    """Merge the results of ranges: for each row, those at first_index[row] to
    first_index[row] + used - 1,
    weighted by the logarithms in `sums`. Reads `depth` at once; returns [rows, dim_pad].
    """
    dims = tl.arange(0, dim_pad)
    acc = tl.zeros([rows, dim_pad], tl.float32)
    total = tl.zeros([rows], tl.float32)
    top = tl.full([rows], NOTHING_YET, tl.float32)
    for first in range(0, used, depth):
        range_index = first + tl.arange(0, depth)
        indices = first_index[:, None] + range_index[None, :]
        mask = valid[:, None] & (range_index < used)[None, :]
        offsets = indices[:, :, None] * dim + dims[None, None, :]
        # Other processors wrote these: .cg bypasses this one's L1 cache.
        logs = tl.load(
            sums + indices, mask=mask, other=float("-inf"), cache_modifier=".cg"
        )
        value_mask = mask[:, :, None] & (dims < dim)[None, None, :]
        values = tl.load(
            partials + offsets, mask=value_mask, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(logs, 1))
        weights = tl.exp2(logs - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * values, 1)
        top = new_top
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def chunk_of(starts, counts, offsets, chunk):
    """A chunk's first position, its number of queries, and the index of the first
    in q.
    """
    start = tl.load(starts + chunk).to(tl.int32)
    if counts is None:
        start, count, offset = start - 1, 1, chunk.to(tl.int64)
    else:
        count = tl.load(counts + chunk).to(tl.int32)
        offset = tl.load(offsets + chunk).to(tl.int64)
    return start, count, offset


@triton.jit
def token_of(offset, query, skip, stride, drafted: tl.constexpr):
    """The index in q of a chunk's query. With `drafted`, the queries after the first are
    not consecutive.
    """
    if drafted:
        return offset + tl.where(query > 0, skip + (query - 1) * stride, 0)
    return offset + query


@triton.jit
def _scan_whole(
    q,
    unit,
    softmax,
    positions,
    lo,
    hi,
    first,
    last,
    first_key,
    context,
    scale,
    cap_scale,
    window: tl.constexpr,
    chunked: tl.constexpr,
    drafted: tl.constexpr,
    scaled: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
):
    """Fold the tiles whose keys are before all rows, which need no causal mask. Returns
    the softmax, and the first tile that does.

    The rows are at positions `first` to `last`.
    """
    # Tiles that the window cuts for some row; then those that all rows see completely.
    cut = lo
    if window > 0:
        cut = tl.minimum(tl.cdiv(_first_visible(last, window, chunked), tile), hi)
        softmax = _scan(
            q,
            unit,
            softmax,
            positions,
            lo,
            cut,
            first_key,
            last,
            context,
            scale,
            cap_scale,
            window,
            chunked,
            True,
            drafted,
            scaled,
            block_size,
            tile,
            dim,
            dim_pad,
        )
    edge = tl.maximum((first + 1) // tile, cut)
    softmax = _scan(
        q,
        unit,
        softmax,
        positions,
        cut,
        edge,
        first_key,
        last,
        context,
        scale,
        cap_scale,
        window,
        chunked,
        False,
        drafted,
        scaled,
        block_size,
        tile,
        dim,
        dim_pad,
    )
    return softmax, edge


@triton.jit
def _scan_sinks(
    q,
    unit,
    softmax,
    positions,
    last,
    range_index,
    context,
    scale,
    cap_scale,
    window: tl.constexpr,
    sink_tokens: tl.constexpr,
    drafted: tl.constexpr,
    scaled: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
):
    """Fold the keys of sink tokens that are before each row's window, in the program of
    the first range (`range_index` 0). The last row is at position `last`.
    """
    last_sinks = tl.minimum(positions - window, sink_tokens - 1)
    last_key = tl.minimum(last - window, sink_tokens - 1)
    end = tl.where(range_index == 0, tl.cdiv(tl.maximum(last_key + 1, 0), tile), 0)
    return _scan(
        q,
        unit,
        softmax,
        last_sinks,
        0,
        end,
        0,
        last_key,
        context,
        scale,
        cap_scale,
        0,
        False,
        True,
        drafted,
        scaled,
        block_size,
        tile,
        dim,
        dim_pad,
    )


@triton.jit
def _to_float16(q):
    """Queries [rows, dim_pad] in float16, and the power of two [rows] that they are
    divided by, so that none overflows: FP8 becomes float16 by one instruction for two
    numbers, and bfloat16 by five.
    """
    wide = q.to(tl.float32)
    top = tl.max(tl.abs(wide), 1)
    exponent = top.to(tl.int32, bitcast=True) & 0x7F800000
    unit = tl.where(exponent > 0, exponent.to(tl.float32, bitcast=True), 1.0)
    return (wide / unit[:, None]).to(tl.float16), unit


# Rows without drafts in the step may begin anywhere among its rows.
@triton.jit(
    do_not_specialize=["splits", "skip", "stride", "max_count"],
    do_not_specialize_on_alignment=["rows", "starts", "counts", "offsets"],
)
def attend(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    rows,
    starts,
    counts,
    offsets,
    sinks,
    out,
    partials,
    sums,
    arrivals,
    scale,
    cap_scale,
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
    stride_token,
    stride_head,
    window: tl.constexpr,
    split: tl.constexpr,
    group: tl.constexpr,
    rows_tile: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    merge_rows: tl.constexpr,
    depth: tl.constexpr,
    drafted: tl.constexpr,
    sink_tokens: tl.constexpr,
    chunked: tl.constexpr,
):
    """Grid [tiles of rows * splits, chunks, kv_heads].

    counts: None in decode, where each chunk is one query and `starts` are contexts.
    drafted: queries are laid out by skip and stride, and each chunk has `max_count`, of
    which those after its count get finite results. k_scales, v_scales [blocks,
    block_size, kv_heads] float32, or None. sinks [heads] float32, or None: gpt-oss'
    attention sinks, one more logit of each head, times log2(e); the first range has it.
    sink_tokens: how many keys at the beginning of a sequence are read beside the window.
    chunked: positions are in chunks of `window`, and queries attend within theirs.
    cap_scale: of capped scores, which `scale` multiplies after their tanh; or None.

    arrivals: a zero for each tile of rows, chunk and key head; zero again afterwards.
    """
    follow()
    range_index = tl.program_id(0) % splits
    chunk = tl.program_id(1)
    kv_head = tl.program_id(2)
    start, count, offset = chunk_of(starts, counts, offsets, chunk)
    queries = max_count if drafted else count
    # The last rows of a chunk see the most keys: they are launched first, so that shorter
    # programs fill the end.
    index = tl.cdiv(queries * group, rows_tile) - 1 - tl.program_id(0) // splits
    if index < 0:
        return
    blocks = table + tl.load(rows + chunk).to(tl.int64) * table_row
    flat = index * rows_tile + tl.arange(0, rows_tile)
    query = flat * 0 if counts is None else flat // group
    token = token_of(offset, query, skip, stride, drafted)
    head = kv_head * group + flat - query * group
    positions = start + query
    last = start + tl.minimum((index * rows_tile + rows_tile - 1) // group, count - 1)
    first = tl.minimum(start + index * rows_tile // group, last)

    dims = tl.arange(0, dim_pad)
    row_mask = flat < queries * group
    valid = row_mask[:, None] & (dims < dim)[None, :]
    query_mask = (flat < count * group)[:, None] & (dims < dim)[None, :]
    q_pointers = q + token[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    queries_tile = tl.load(q_pointers, mask=query_mask, other=0.0)
    unit = None
    if k_cache.dtype.element_ty == tl.float8e4nv and q.dtype.element_ty == tl.bfloat16:
        queries_tile, unit = _to_float16(queries_tile)
    k_head = k_cache + kv_head * stride_head
    v_head = v_cache + kv_head * stride_head
    acc = tl.zeros([rows_tile, dim_pad], tl.float32)
    top = tl.full([rows_tile], NOTHING_YET, tl.float32)
    total = tl.zeros([rows_tile], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=row_mask, other=NOTHING_YET)
        top = tl.where(range_index == 0, sink, top)
        total = tl.where(range_index == 0, 1.0, total)
    softmax = Softmax(acc, top, total)
    first_key = _first_visible(first, window, chunked) if window > 0 else 0
    scaled: tl.constexpr = k_scales is not None
    context = HeadPages(
        start,
        k_head,
        v_head,
        blocks,
        stride_block,
        stride_token,
        k_scales + kv_head if scaled else k_head,
        v_scales + kv_head if scaled else v_head,
        tl.num_programs(2),
    )
    if sink_tokens > 0:
        softmax = _scan_sinks(
            queries_tile,
            unit,
            softmax,
            positions,
            last,
            range_index,
            context,
            scale,
            cap_scale,
            window,
            sink_tokens,
            drafted,
            scaled,
            block_size,
            tile,
            dim,
            dim_pad,
        )
    lo = first_key // tile
    hi = tl.cdiv(last + 1, tile)
    if counts is None or split:
        share = tl.maximum(tl.cdiv(hi - lo, splits), 1)
        used = tl.maximum(tl.cdiv(hi - lo, share), 1)
        if range_index >= used:
            return
        lo += range_index * share
        hi = tl.minimum(lo + share, hi)
    else:
        softmax, lo = _scan_whole(
            queries_tile,
            unit,
            softmax,
            positions,
            lo,
            hi,
            first,
            last,
            first_key,
            context,
            scale,
            cap_scale,
            window,
            chunked,
            drafted,
            scaled,
            block_size,
            tile,
            dim,
            dim_pad,
        )
    acc, top, total = _scan(
        queries_tile,
        unit,
        softmax,
        positions,
        lo,
        hi,
        first_key,
        last,
        context,
        scale,
        cap_scale,
        window,
        chunked,
        True,
        drafted,
        scaled,
        block_size,
        tile,
        dim,
        dim_pad,
    )

    divisor = tl.where(total > 0, total, 1.0)
    result = acc / divisor[:, None]
    if split:
        heads = tl.num_programs(2) * group
        result_index = (token * heads + head) * splits + range_index
        # log2 of the range's sum of exponentials; -inf if it has none.
        logs = tl.where(total > 0, top + tl.log2(divisor), float("-inf"))
        tl.store(sums + result_index, logs, mask=row_mask)
        tl.store(
            partials + result_index[:, None] * dim + dims[None, :], result, mask=valid
        )
        counters = arrivals + (index * tl.num_programs(1) + chunk) * tl.num_programs(2)
        if arrive(counters, kv_head) == used - 1:
            tl.store(counters + kv_head, 0)
            row = index * rows_tile + tl.arange(0, merge_rows)
            merged_token = token_of(offset, row // group, skip, stride, drafted)
            merged_head = kv_head * group + row % group
            first_result = (merged_token * heads + merged_head) * splits
            merged_mask = row < queries * group
            merged = _merge(
                partials,
                sums,
                first_result,
                merged_mask,
                used,
                merge_rows,
                depth,
                dim,
                dim_pad,
            )
            merged_pointers = (
                out
                + merged_token[:, None] * out_row
                + merged_head[:, None] * out_head
                + dims[None, :]
            )
            tl.store(
                merged_pointers,
                merged.to(out.dtype.element_ty),
                mask=merged_mask[:, None] & (dims < dim),
            )
    else:
        out_pointers = (
            out + token[:, None] * out_row + head[:, None] * out_head + dims[None, :]
        )
        tl.store(out_pointers, result.to(out.dtype.element_ty), mask=valid)
