"""The kernels of gated_rule.py that take a block of tokens at once; theory is there."""

from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.gated_rule_kernels import step_size
from minfer.kernels.head_gates import activated
from minfer.kernels.pdl import follow
from minfer.kernels.state_kernels import find_block, first_block, unit_pointers

SUB = tl.constexpr(16)  # rows of a diagonal block that substitution inverts
FACTORS = 4  # vectors of a block's tokens, that `prepare` stores
_FACTORS = tl.constexpr(FACTORS)


@triton.jit
def _unit_inverse(lower, block: tl.constexpr):
    """The inverse of I + lower [block, block] in float32; `lower` is strictly lower
    triangular.

    Diagonal blocks D are inverted by forward substitution, all at once. With the rest L
    of the matrix, M = -D^-1 L is nilpotent: (D + L)^-1 = (I - M)^-1 D^-1, and
    (I - M)^-1 = (I + M) (I + M^2) as there are at most four blocks.
    """
    count: tl.constexpr = block // SUB
    part = tl.arange(0, count)[:, None, None, None]
    other = tl.arange(0, count)[None, None, :, None]
    tiles = tl.reshape(lower, (count, SUB, count, SUB))
    diagonal = tl.sum(tl.where(part == other, tiles, 0.0), 2)
    line = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    inverse = tl.where(line == column, 1.0, 0.0) + tl.zeros_like(diagonal)
    # Row i of D, along the rows of the inverse that it weights, needs no other layout.
    transposed = tl.permute(diagonal, (0, 2, 1))
    for i in range(1, SUB):
        # Row i of the inverse: of the identity, less row i of D times the rows before.
        weights = tl.sum(tl.where(column == i, transposed, 0.0), 2)
        change = tl.sum(weights[:, :, None] * inverse, 1)
        inverse -= tl.where(line == i, change[:, None, :], 0.0)
    if count == 1:
        result = tl.reshape(inverse, (block, block))
    else:
        spread = tl.where(part == other, inverse[:, :, None, :], 0.0)
        inverses = tl.reshape(spread, (block, block))
        rest = tl.reshape(tl.where(part == other, 0.0, tiles), (block, block))
        power = -tl.dot(inverses, rest)
        square = tl.dot(power, power)
        result = inverses + tl.dot(power, inverses)
        result += tl.dot(square, result)
    return result


@triton.jit
def _store_square(pointers, number, square, block: tl.constexpr):
    """Store a matrix [block, block] of a block of tokens and this program's head."""
    line = tl.arange(0, block)
    first = (number.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * block * block
    tl.store(pointers + first + line[:, None] * block + line[None, :], square)


@triton.jit(do_not_specialize=["chunks"])
def prepare(
    q,
    k,
    raw,
    bias,
    rates,
    beta,
    counts,
    offsets,
    inverses,
    scores,
    factors,
    q_stride,
    k_stride,
    raw_stride,
    beta_stride,
    chunks,
    low,
    high,
    l2_eps,
    scale,
    shared: tl.constexpr,
    keys: tl.constexpr,
    key_pad: tl.constexpr,
    block: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [blocks, heads]: what of a block does not depend on the state, under decays of
    one number a head.
    """
    head = tl.program_id(1)
    line = tl.arange(0, block)
    lane = tl.arange(0, key_pad)
    rate = tl.load(rates + head)
    shift = tl.load(bias + head)
    follow()
    chunk, number = find_block(counts, chunks, tl.program_id(0), block, pad)
    if chunk >= chunks:
        return
    place = number * block + line
    mask = place < tl.load(counts + chunk)
    token = tl.load(offsets + chunk) + place.to(tl.int64)
    inner = head // shared * keys + lane[None, :]
    key_mask = mask[:, None] & (lane < keys)[None, :]
    key = tl.load(k + token[:, None] * k_stride + inner, mask=key_mask, other=0.0)
    query = tl.load(q + token[:, None] * q_stride + inner, mask=key_mask, other=0.0)
    key_scale = tl.full([block], 1.0, tl.float32)
    query_scale = tl.zeros([block], tl.float32) + scale
    if l2_eps is not None:
        key_scale = _inverse_length(key, l2_eps)
        query_scale *= _inverse_length(query, l2_eps)
    raws = tl.load(raw + token * raw_stride + head, mask=mask, other=0.0)
    # Of tokens behind the last: the state neither decays nor takes anything.
    step = tl.where(mask, step_size(raws, shift, low, high), 0.0)
    growth = tl.cumsum(-rate * step, 0)
    last = tl.sum(tl.where(line == block - 1, growth, 0.0), 0)
    is_later = line[:, None] >= line[None, :]
    change = tl.where(is_later, growth[:, None] - growth[None, :], float("-inf"))
    decay = tl.exp(change) * key_scale[None, :]
    products = tl.dot(query, tl.trans(key))
    products *= decay * query_scale[:, None]
    written = tl.exp(last - growth) * key_scale
    if beta is None:
        products *= step[None, :]
        written *= step
    _store_square(scores, tl.program_id(0), products, block)
    heads = tl.num_programs(1)
    factors += (tl.program_id(0).to(tl.int64) * heads + head) * (_FACTORS * block) + line
    tl.store(factors, tl.exp(growth) * key_scale)
    tl.store(factors + block, tl.exp(growth) * query_scale)
    tl.store(factors + 2 * block, written)
    tl.store(factors + 3 * block, tl.zeros([block], tl.float32) + tl.exp(last))
    if beta is not None:
        strength = tl.load(beta + token * beta_stride + head, mask=mask, other=0.0)
        strength = tl.where(mask, activated(strength.to(tl.float32), "sigmoid"), 0.0)
        lower = tl.dot(key, tl.trans(key)) * decay
        lower *= (strength * key_scale)[:, None]
        lower = tl.where(line[:, None] > line[None, :], lower, 0.0)
        inverse = _unit_inverse(lower, block) * strength[None, :]
        _store_square(inverses, tl.program_id(0), inverse, block)


@triton.jit
def _inverse_length(vectors, eps):
    """1 / sqrt(sum of squares + eps) of each row."""
    wide = vectors.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit(do_not_specialize=["chunks"])
def prepare_channels(
    q,
    k,
    raw,
    bias,
    rates,
    beta,
    counts,
    offsets,
    inverses,
    scores,
    queries,
    read_keys,
    written_keys,
    totals,
    q_stride,
    k_stride,
    raw_stride,
    beta_stride,
    chunks,
    low,
    high,
    l2_eps,
    scale,
    shared: tl.constexpr,
    keys: tl.constexpr,
    key_pad: tl.constexpr,
    block: tl.constexpr,
    pad: tl.constexpr,
):
    """`prepare` under decays of each channel, with the delta rule.

    Products are sums of x_i k_j exp(g_i - g_j) over channels, not products of matrices:
    exp(-g_j) alone may overflow.
    """
    head = tl.program_id(1)
    line = tl.arange(0, block)
    lane = tl.arange(0, key_pad)
    channel = head * keys + lane
    rate = tl.load(rates + head)
    shift = tl.load(bias + channel, mask=lane < keys, other=0.0)
    follow()
    chunk, number = find_block(counts, chunks, tl.program_id(0), block, pad)
    if chunk >= chunks:
        return
    place = number * block + line
    mask = place < tl.load(counts + chunk)
    token = tl.load(offsets + chunk) + place.to(tl.int64)
    inner = head // shared * keys + lane[None, :]
    key_mask = mask[:, None] & (lane < keys)[None, :]
    key = tl.load(k + token[:, None] * k_stride + inner, mask=key_mask, other=0.0)
    query = tl.load(q + token[:, None] * q_stride + inner, mask=key_mask, other=0.0)
    key = key.to(tl.float32)
    query = query.to(tl.float32)
    if l2_eps is not None:
        key *= _inverse_length(key, l2_eps)[:, None]
        query *= _inverse_length(query, l2_eps)[:, None]
    query *= scale
    raw_pointers = raw + token[:, None] * raw_stride + channel[None, :]
    raws = tl.load(raw_pointers, mask=key_mask, other=0.0)
    step = step_size(raws, shift[None, :], low, high)
    growth = tl.cumsum(tl.where(key_mask, -rate * step, 0.0), 0)
    products = tl.zeros([block, block], tl.float32)
    lower = tl.zeros([block, block], tl.float32)
    for j in range(block):
        is_j = (line == j)[:, None]
        key_j = tl.sum(tl.where(is_j, key, 0.0), 0)[None, :]
        growth_j = tl.sum(tl.where(is_j, growth, 0.0), 0)[None, :]
        is_later = (line >= j)[:, None]
        decayed = key_j * tl.exp(tl.where(is_later, growth - growth_j, float("-inf")))
        column = (line == j)[None, :]
        products = tl.where(column, tl.sum(query * decayed, 1)[:, None], products)
        lower = tl.where(column, tl.sum(key * decayed, 1)[:, None], lower)
    strength = tl.load(beta + token * beta_stride + head, mask=mask, other=0.0)
    strength = tl.where(mask, activated(strength.to(tl.float32), "sigmoid"), 0.0)
    lower = tl.where(line[:, None] > line[None, :], lower * strength[:, None], 0.0)
    inverse = _unit_inverse(lower, block) * strength[None, :]
    _store_square(inverses, tl.program_id(0), inverse, block)
    _store_square(scores, tl.program_id(0), products, block)
    last = tl.sum(tl.where((line == block - 1)[:, None], growth, 0.0), 0)
    heads = tl.num_programs(1)
    scaled = (token[:, None] * heads + head) * keys + lane[None, :]
    tl.store(queries + scaled, query * tl.exp(growth), mask=key_mask)
    tl.store(read_keys + scaled, key * tl.exp(growth), mask=key_mask)
    written = key * tl.exp(last[None, :] - growth)
    tl.store(written_keys + scaled, written, mask=key_mask)
    total = (tl.program_id(0).to(tl.int64) * heads + head) * keys + lane
    tl.store(totals + total, tl.exp(last), mask=lane < keys)


class _BlockFactors(NamedTuple):
    """What `prepare` stores of a block's tokens and a head, [block] each."""

    read: tl.tensor  # of keys that read the state
    asked: tl.tensor  # of queries
    written: tl.tensor  # of keys that are written
    total: tl.tensor  # of the state, a number


@triton.jit
def _block_factors(factors, number, exists, block: tl.constexpr):
    line = tl.arange(0, block)
    pointers = factors + number * (_FACTORS * block)
    end = tl.where(exists, block, 0)
    mask = line < end
    return _BlockFactors(
        tl.load(pointers + line, mask=mask, other=0.0),
        tl.load(pointers + block + line, mask=mask, other=0.0),
        tl.load(pointers + 2 * block + line, mask=mask, other=0.0),
        tl.load(pointers + 3 * block, mask=end > 0, other=0.0),
    )


@triton.jit(do_not_specialize=["first_page", "first_unit"])
def carry(
    q,
    k,
    written_keys,
    v,
    inverses,
    scores,
    factors,
    totals,
    skip,
    out,
    rows,
    starts,
    counts,
    offsets,
    table,
    pages,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    page_stride,
    first_page,
    first_unit,
    per_page,
    shared: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    key_pad: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [tiles of a head's values, heads, chunks]: a program carries `tile` columns of
    a state from block to block. `inverses`: of the delta rule. Under decays of each
    channel there are `totals` instead of `factors`, and queries and keys are scaled.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    chunk = tl.program_id(2)
    line = tl.arange(0, block)
    key_lane = tl.arange(0, key_pad)
    lane = tl.program_id(0) * tile + tl.arange(0, tile)
    follow()
    count = tl.load(counts + chunk)
    if count == 0:
        return
    key_mask = key_lane < keys
    value_mask = lane < values
    table += tl.load(rows + chunk).to(tl.int64) * table_stride
    unit = first_unit + head
    state_pointers = unit_pointers(
        pages, page_stride, table, first_page, unit, per_page, keys * values, None
    )
    state_pointers += key_lane[:, None] * values + lane[None, :]
    state_mask = key_mask[:, None] & value_mask[None, :]
    old_end = tl.where(tl.load(starts + chunk) != 0, values, 0)
    is_old = key_mask[:, None] & (lane < old_end)[None, :]
    state = tl.load(state_pointers, mask=is_old, other=0.0).to(tl.float32)
    first = tl.load(offsets + chunk).to(tl.int64)
    number = first_block(counts, chunk, block, pad).to(tl.int64) * heads + head
    square = line[:, None] * block + line[None, :]
    if totals is None:
        block_factors = _block_factors(factors, number, True, block)
    for begin in range(0, count, block):
        mask = begin + line < count
        token = first + begin + line
        inner = head // shared * keys + key_lane[None, :]
        key_mask_2d = mask[:, None] & key_mask[None, :]
        value_mask_2d = mask[:, None] & value_mask[None, :]
        value_pointers = v + token[:, None] * v_stride + head * values + lane[None, :]
        value = tl.load(value_pointers, mask=value_mask_2d, other=0.0)
        key_pointers = token[:, None] * k_stride + inner
        key = tl.load(k + key_pointers, mask=key_mask_2d, other=0.0)
        query_pointers = q + token[:, None] * q_stride + inner
        query = tl.load(query_pointers, mask=key_mask_2d, other=0.0)
        rounded = state.to(key.dtype)
        new = value
        if totals is None:
            # Of the next block, early: nothing waits for them here.
            has_next = begin + block < count
            next_factors = _block_factors(factors, number + heads, has_next, block)
        if inverses is not None:
            seen = tl.dot(key, rounded)
            if totals is None:
                seen *= block_factors.read[:, None]
            change = (value.to(tl.float32) - seen).to(key.dtype)
            inverse = tl.load(inverses + number * (block * block) + square)
            new = tl.dot(inverse, change).to(key.dtype)
        result = tl.dot(query, rounded)
        if totals is None:
            result *= block_factors.asked[:, None]
        score = tl.load(scores + number * (block * block) + square)
        result = tl.dot(score, new, result)
        if skip is not None:
            result += value.to(tl.float32) * tl.load(skip + head)
        out_pointers = out + (token[:, None] * heads + head) * values + lane[None, :]
        tl.store(out_pointers, result, mask=value_mask_2d)
        if totals is None:
            written = new.to(tl.float32) * block_factors.written[:, None]
            state *= block_factors.total
            state = tl.dot(tl.trans(key), written.to(key.dtype), state)
            block_factors = next_factors
        else:
            total = tl.load(totals + number * keys + key_lane, mask=key_mask, other=0.0)
            state *= total[:, None]
            key = tl.load(written_keys + key_pointers, mask=key_mask_2d, other=0.0)
            state = tl.dot(tl.trans(key), new, state)
        number += heads
    tl.store(state_pointers, state, mask=state_mask)
