"""The Triton kernels of expanded_latents.py, which has their theory, and runs them."""

import math

import triton
import triton.language as tl

from minfer.kernels.attention_kernels import NOTHING_YET

LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _fold(
    q_plain,
    q_rope,
    acc,
    top,
    total,
    num_visible,
    lo,
    hi,
    keys,
    expanded,
    rotated,
    scale,
    key_row,
    rotated_row,
    masked: tl.constexpr,
    tile: tl.constexpr,
    plain: tl.constexpr,
    plain_pad: tl.constexpr,
    rope: tl.constexpr,
    rope_pad: tl.constexpr,
    value_dim: tl.constexpr,
    value_pad: tl.constexpr,
):
    """Fold tiles lo .. hi - 1 of `keys` keys into a softmax of rows, each of which sees
    its first `num_visible` [rows] keys; without `masked`, all of these tiles.
    """
    plains = tl.arange(0, plain_pad)
    ropes = tl.arange(0, rope_pad)
    values = tl.arange(0, value_pad)
    for index in range(lo, hi):
        token = index * tile + tl.arange(0, tile)
        place = expanded + token[:, None].to(tl.int64) * key_row
        rotated_place = rotated + token[:, None].to(tl.int64) * rotated_row
        key_mask = (token < keys)[:, None]
        key = tl.load(
            place + plains[None, :], mask=key_mask & (plains < plain)[None, :], other=0.0
        )
        key_rope = tl.load(
            rotated_place + ropes[None, :],
            mask=key_mask & (ropes < rope)[None, :],
            other=0.0,
        )
        value = tl.load(
            place + plain + values[None, :],
            mask=key_mask & (values < value_dim)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_plain, tl.trans(key), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(key_rope), scores, input_precision="ieee")
        if masked:
            scores = tl.where(
                token[None, :] < num_visible[:, None], scores, float("-inf")
            )
        # `top` starts at a finite number, so a row that sees no key yet has no inf - inf.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        weights = weights.to(value.dtype)
        acc = tl.dot(weights, value, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


# sums_head is the tokens of a step.
@triton.jit(do_not_specialize=["sums_head"])
def attend_piece(
    q,
    expanded,
    rotated,
    q_bounds,
    bounds,
    out,
    sums,
    scale,
    q_row,
    q_head,
    key_row,
    key_head,
    rotated_row,
    out_row,
    out_head,
    sums_row,
    sums_head,
    causal: tl.constexpr,
    rows_tile: tl.constexpr,
    tile: tl.constexpr,
    plain: tl.constexpr,
    plain_pad: tl.constexpr,
    rope: tl.constexpr,
    rope_pad: tl.constexpr,
    value_dim: tl.constexpr,
    value_pad: tl.constexpr,
):
    """Grid [tiles of queries, chunks, heads]."""
    chunk = tl.program_id(1)
    head = tl.program_id(2)
    offset = tl.load(q_bounds + chunk)
    count = tl.load(q_bounds + chunk + 1) - offset
    # The last rows of a chunk see the most keys: they are launched first, so that shorter
    # programs fill the end.
    index = tl.cdiv(count, rows_tile) - 1 - tl.program_id(0)
    if index < 0:
        return
    begin = tl.load(bounds + chunk)
    keys = tl.load(bounds + chunk + 1) - begin
    query = index * rows_tile + tl.arange(0, rows_tile)
    query_mask = query < count
    token = (offset + query).to(tl.int64)
    num_visible = tl.zeros([rows_tile], tl.int32) + keys
    hi = tl.cdiv(keys, tile)
    num_full_tiles = keys // tile  # tiles that all rows see
    if causal:
        num_visible = tl.minimum(keys - count + query + 1, keys)
        after = keys - count + (index + 1) * rows_tile
        hi = tl.cdiv(tl.maximum(tl.minimum(after, keys), 0), tile)
        first = keys - count + index * rows_tile + 1  # keys that the first row sees
        num_full_tiles = tl.maximum(tl.minimum(first, keys), 0) // tile

    plains = tl.arange(0, plain_pad)
    ropes = tl.arange(0, rope_pad)
    values = tl.arange(0, value_pad)
    place = q + token[:, None] * q_row + head * q_head
    row_mask = query_mask[:, None]
    q_plain = tl.load(
        place + plains[None, :], mask=row_mask & (plains < plain)[None, :], other=0.0
    )
    q_rope = tl.load(
        place + plain + ropes[None, :], mask=row_mask & (ropes < rope)[None, :], other=0.0
    )
    expanded += begin.to(tl.int64) * key_row + head * key_head
    rotated += begin.to(tl.int64) * rotated_row
    acc = tl.zeros([rows_tile, value_pad], tl.float32)
    top = tl.full([rows_tile], NOTHING_YET, tl.float32)
    total = tl.zeros([rows_tile], tl.float32)
    for masked in tl.static_range(2):
        acc, top, total = _fold(
            q_plain,
            q_rope,
            acc,
            top,
            total,
            num_visible,
            num_full_tiles if masked else 0,
            hi if masked else num_full_tiles,
            keys,
            expanded,
            rotated,
            scale,
            key_row,
            rotated_row,
            masked,
            tile,
            plain,
            plain_pad,
            rope,
            rope_pad,
            value_dim,
            value_pad,
        )
    # Compared with 0, so that NaN stays.
    divisor = tl.where(total == 0, 1.0, total)
    logs = tl.where(total == 0, float("-inf"), (top + tl.log2(divisor)) * LN_2)
    tl.store(sums + token * sums_row + head * sums_head, logs, mask=query_mask)
    out_pointers = out + token[:, None] * out_row + head * out_head + values[None, :]
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    tl.store(out_pointers, result, mask=row_mask & (values < value_dim)[None, :])


@triton.jit(do_not_specialize=["count", "heads", "sums_head"])
def merge_pieces(
    total,
    sums,
    piece,
    piece_sums,
    count,
    heads,
    piece_row,
    piece_head,
    sums_row,
    sums_head,
    rows: tl.constexpr,
    value_dim: tl.constexpr,
    value_pad: tl.constexpr,
):
    """Grid [rows of (token, head)]."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    values = tl.arange(0, value_pad)
    row_mask = row < count
    token = row // heads
    head = row % heads
    old = tl.load(sums + row, mask=row_mask, other=float("-inf"))
    piece_sum_pointers = piece_sums + token * sums_row + head * sums_head
    new = tl.load(piece_sum_pointers, mask=row_mask, other=float("-inf"))
    top = tl.maximum(tl.maximum(old, new), NOTHING_YET)
    old_share = tl.exp(old - top)
    new_share = tl.exp(new - top)
    total_share = old_share + new_share
    divisor = tl.where(total_share == 0, 1.0, total_share)
    value_mask = row_mask[:, None] & (values < value_dim)[None, :]
    total_pointers = total + row[:, None] * value_dim + values[None, :]
    piece_pointers = (
        piece + token[:, None] * piece_row + head[:, None] * piece_head + values[None, :]
    )
    old_values = tl.load(total_pointers, mask=value_mask, other=0.0)
    # A piece without keys for a row says nothing of it.
    piece_values = tl.load(
        piece_pointers, mask=value_mask & (new != float("-inf"))[:, None], other=0.0
    )
    merged = old_values * (old_share / divisor)[:, None]
    merged += piece_values.to(tl.float32) * (new_share / divisor)[:, None]
    tl.store(total_pointers, merged, mask=value_mask)
    logs = tl.where(total_share == 0, float("-inf"), top + tl.log(divisor))
    tl.store(sums + row, logs, mask=row_mask)
