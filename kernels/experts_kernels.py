"""The Triton kernels of mixtures of experts; experts.py has their theory, and launches
them.

A pair is a token and one of its experts: number token * top_k + k. `ids` and `weights`
have a value a pair. Weights are of what experts return, or of their inputs: then the
kernels of gates have them, and those of outputs None.
"""

import triton
import triton.language as tl

from minfer.kernels.activation import gated_product
from minfer.kernels.leaf_tiles import (
    add_lanes,
    add_products,
    leaf_lines,
    load_row,
    load_tile,
    no_sums,
    prefetch_lines,
)
from minfer.kernels.pdl import arrive, follow, follow_first
from minfer.kernels.quantized_kernels import scaled_to_8_bits


@triton.jit
def few_gate_up(
    x,
    x_stride,
    weight,
    scales,
    extras,
    bias,
    out,
    ids,
    weights,
    added,
    top_k: tl.constexpr,
    columns: tl.constexpr,
    size: tl.constexpr,
    scaled: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [pairs, tiles of columns]: out [pairs, columns], activated. Without gates,
    what is activated is in their place. `added` [pairs, (1 + gated) * columns]: what
    adapters add to the products.
    """
    follow_first()
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair).to(tl.int64)
    if expert >= 0:
        column = tl.program_id(1) * cols + tl.arange(0, cols)
        column_mask = column < columns
        # Lines past the end repeat the last: no mask is needed.
        line = tl.minimum(column, columns - 1)
        line = expert * (1 + gated) * columns + line
        gates = leaf_lines(weight, scales, extras, line, size, scaled)
        ups = leaf_lines(weight, scales, extras, line + columns * gated, size, scaled)
        row = x + pair // top_k * x_stride
        gate = no_sums(cols, weight, depth, scaled)
        up = no_sums(cols, weight, depth, scaled)
        full: tl.constexpr = size % depth == 0
        for k in tl.range(0, size, depth, num_stages=stages):
            w = load_tile(gates, k, size, full, depth, scaled)
            y = load_row(row, k, size, full, weight, depth)
            gate = add_lanes(gate, w, y, True)
            if gated:
                v = load_tile(ups, k, size, full, depth, scaled)
                up = add_lanes(up, v, y, True)
        gate = tl.sum(gate, 1)
        up = tl.sum(up, 1)
        if added is not None:
            place = added + pair * (1 + gated) * columns + tl.minimum(column, columns - 1)
            gate += tl.load(place).to(tl.float32)
            if gated:
                up += tl.load(place + columns).to(tl.float32)
        if weights is not None:
            share = tl.load(weights + pair)
            gate *= share
            up *= share
        if bias is not None:
            gate += tl.load(bias + line)
            if gated:
                up += tl.load(bias + line + columns)
        if not gated:
            up = tl.full([cols], 1.0, tl.float32)
        activated = gated_product(gate, up, activation).to(out.dtype.element_ty)
        tl.store(out + pair * columns + column, activated, mask=column_mask)


@triton.jit
def _down_tile(
    weight,
    scales,
    extras,
    expert,
    line,
    k,
    columns: tl.constexpr,
    size: tl.constexpr,
    depth: tl.constexpr,
    scaled: tl.constexpr,
):
    """Weights [lines, lanes] of an expert; of no expert, none are read."""
    limit = tl.where(expert >= 0, size, 0)
    line = expert * columns + line
    leaf = leaf_lines(weight, scales, extras, line, size, scaled)
    return load_tile(leaf, k, limit, False, depth, scaled)


@triton.jit
def _choice(ids, weights, first, top_k: tl.constexpr):
    """The experts of `top_k` pairs from `first` on, and their weights, if there are any.
    The kernel before the one of gates wrote them.
    """
    experts, shares = (), ()
    for i in tl.static_range(top_k):
        expert = tl.load(ids + first + i, cache_modifier=".cg").to(tl.int64)
        experts += (expert,)  # type: ignore[assignment]  # a tuple of Triton grows
        if weights is not None:
            share_pointer = weights + first + i
            share = tl.load(share_pointer, expert >= 0, other=0.0, cache_modifier=".cg")
            shares += (share,)  # type: ignore[assignment]  # as above
    return experts, shares


@triton.jit
def few_down(
    x,
    weight,
    scales,
    extras,
    bias,
    residual,
    residual_stride,
    ids,
    weights,
    top_k: tl.constexpr,
    columns: tl.constexpr,
    size: tl.constexpr,
    scaled: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    ahead: tl.constexpr,
):
    """Grid [tokens, tiles of columns]: residual [tokens, columns] += the weighted sum of
    a token's experts of x [pairs, size], in the order of its pairs. What was chosen, and
    `ahead` tiles of weights, are loaded while the kernel before, of `few_gate_up`, runs.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * cols + tl.arange(0, cols)
    # Lines past the end repeat the last.
    line = tl.minimum(column, columns - 1)
    passes: tl.constexpr = (size + depth - 1) // depth
    experts, shares = _choice(ids, weights, token * top_k, top_k)
    tiles = ()
    for n in tl.static_range(min(ahead, top_k * passes)):
        expert, k = experts[n // passes], n % passes * depth
        tile = _down_tile(
            *(weight, scales, extras, expert, line, k), columns, size, depth, scaled
        )
        tiles += (tile,)  # type: ignore[assignment]  # a tuple of Triton grows
    follow()
    out_pointers = residual + token * residual_stride + column
    before = tl.load(out_pointers, mask=column < columns, other=0.0)
    acc = no_sums(cols, weight, depth, scaled)
    start = tl.zeros([cols], tl.float32)
    for n in tl.static_range(top_k * passes):
        expert, k = experts[n // passes], n % passes * depth
        if n < ahead:
            w = tiles[n]  # type: ignore[var-annotated]  # as above
        else:
            w = _down_tile(
                *(weight, scales, extras, expert, line, k), columns, size, depth, scaled
            )
        row = x + (token * top_k + n // passes) * size
        limit = tl.where(expert >= 0, size, 0)
        y = load_row(row, k, limit, False, weight, depth)
        products = add_lanes(tl.zeros_like(acc), w, y, True)
        if weights is not None:
            products *= shares[n // passes]
        acc += products
        if bias is not None and n % passes == 0:
            bias_pointers = bias + expert * columns + line
            bias_mask = line < tl.where(expert >= 0, columns, 0)
            bias_line = tl.load(bias_pointers, mask=bias_mask, other=0.0)
            start += bias_line if weights is None else shares[n // passes] * bias_line
    acc = tl.sum(acc, 1) + start + before
    tl.store(out_pointers, acc.to(residual.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["pairs", "tokens", "max_tiles"])
def group_pairs(
    ids,
    lists,
    tiles,
    counts,
    pairs,
    tokens,
    max_tiles,
    experts: tl.constexpr,
    rows: tl.constexpr,
    chunk: tl.constexpr,
    lanes: tl.constexpr,
):
    """Grid [chunks of pairs]: the pairs of each expert, and the tiles of rows.

    lists [experts, tokens]: an expert's pairs, in any order. tiles [1 + 3 * max_tiles]:
    how many there are; then of each its expert, its first place in the expert's list, and
    its rows. counts: zeros, for programs that have finished and for each expert's pairs.
    """
    follow()
    pair = tl.program_id(0) * chunk + tl.arange(0, chunk)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    is_pair = expert >= 0
    place = tl.atomic_add(counts + 1 + expert, 1, mask=is_pair, sem="relaxed")
    tl.store(lists + expert.to(tl.int64) * tokens + place, pair, mask=is_pair)
    if arrive(counts, 0) == tl.num_programs(0) - 1:
        tl.store(counts, 0)  # for the next launch
        expert_lane = tl.arange(0, lanes)
        expert_mask = expert_lane < experts
        count = tl.load(counts + 1 + expert_lane, mask=expert_mask, other=0)
        tl.store(counts + 1 + expert_lane, tl.zeros_like(count), mask=expert_mask)
        num_tiles = (count + rows - 1) // rows
        end = tl.cumsum(num_tiles, 0)
        tl.store(tiles, tl.sum(num_tiles, 0))
        tile_pointers = tiles + 1 + (end - num_tiles)
        for i in range(tl.max(num_tiles, 0)):
            tile_mask = i < num_tiles
            tl.store(tile_pointers + i, expert_lane, mask=tile_mask)
            tl.store(
                tile_pointers + i + max_tiles,
                tl.zeros_like(expert_lane) + i * rows,
                mask=tile_mask,
            )
            left = tl.minimum(count - i * rows, rows)
            tl.store(tile_pointers + i + 2 * max_tiles, left, mask=tile_mask)


@triton.jit
def _swizzled(row_tiles, column_tiles, group: tl.constexpr):
    """A program's tile of rows and of columns: of `group` tiles of rows, which are mostly
    of one expert, those of the same columns run together.
    """
    program = tl.program_id(0)
    area = group * column_tiles
    first = program // area * group
    height = tl.minimum(row_tiles - first, group)
    return first + program % area % height, program % area // height


@triton.jit(do_not_specialize=["tokens", "max_tiles"])
def grouped(
    x,
    x_stride,
    x_scales,
    weight,
    scales,
    extras,
    bias,
    out,
    out_scales,
    weights,
    added,
    lists,
    tiles,
    tokens,
    max_tiles,
    top_k: tl.constexpr,
    columns: tl.constexpr,
    size: tl.constexpr,
    scaled: tl.constexpr,
    activation: tl.constexpr,
    gated: tl.constexpr,
    rows: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    swapped: tl.constexpr,
    stages: tl.constexpr,
    largest: tl.constexpr,
):
    """Grid [tiles of rows * tiles of columns]: out [pairs, columns], of row pair // top_k
    of x. With activation: gates and what they multiply, if it is gated, or what is
    activated. Without: one matrix an expert, whose first weights are prefetched while the
    kernel before, of the gates, runs. `added` [pairs, lines of an expert]: what adapters
    add to the products.

    x_scales [rows, groups]: x is in 8 bits, as weights are. out_scales [pairs, tiles of
    columns]: what is stored is rounded to 8 bits, of which `largest` is the largest.
    """
    if activation is not None:
        follow_first()
    tile, column_tile = _swizzled(max_tiles, tl.cdiv(columns, cols), group)
    # Past the last tile there is no value, which is not used.
    expert = tl.load(tiles + 1 + tile, cache_modifier=".cg").to(tl.int64)
    first = tl.load(tiles + 1 + max_tiles + tile, cache_modifier=".cg")
    left = tl.load(tiles + 1 + 2 * max_tiles + tile, cache_modifier=".cg")
    exists = tile < tl.load(tiles, cache_modifier=".cg")
    lines_per_column: tl.constexpr = 2 if gated else 1
    lines: tl.constexpr = cols * lines_per_column
    # Gates and what they multiply alternate. Lines past the end repeat the last.
    line = tl.arange(0, lines)
    column = tl.minimum(column_tile * cols + line // lines_per_column, columns - 1)
    line = (
        expert * (lines_per_column * columns) + column + line % lines_per_column * columns
    )
    leaf = leaf_lines(weight, scales, extras, line, size, scaled)
    if activation is None:
        if exists:
            for i in tl.static_range(stages):
                prefetch_lines(leaf[0], i * depth, size, depth)
        follow()
    if exists:
        row = tl.arange(0, rows)
        row_mask = row < left
        pair = tl.load(lists + expert * tokens + first + row, mask=row_mask, other=0)
        x_row = (pair // top_k).to(tl.int64)[:, None]
        x_scale = None
        if x_scales is not None:
            x_scale = x_scales + x_row * (size // scaled)
        acc = _tile(
            x + x_row * x_stride,
            x_scale,
            row_mask[:, None],
            leaf,
            size,
            depth,
            scaled,
            swapped,
            stages,
        )
        if scales is not None and scaled == 0:
            acc *= tl.load(scales + line)[None, :]
        if added is not None:
            width: tl.constexpr = lines_per_column * columns
            own_line = line - expert * width
            place = pair.to(tl.int64)[:, None] * width + own_line[None, :]
            more = tl.load(added + place, mask=row_mask[:, None], other=0.0)
            acc += more.to(tl.float32)
        if weights is not None:
            acc *= tl.load(weights + pair, mask=row_mask, other=0.0)[:, None]
        if bias is not None:
            acc += tl.load(bias + line)[None, :]
        if activation is not None:
            acc = _activated(acc, activation, gated)
        _store_tile(
            acc, out, out_scales, pair, row_mask, column_tile, columns, cols, largest
        )


@triton.jit
def _activated(acc, activation: tl.constexpr, gated: tl.constexpr):
    """What gates and ups [rows, lines], which alternate, give; or what is activated."""
    if gated:
        gate, up = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
        acc = gated_product(gate, up, activation)
    else:
        acc = gated_product(acc, 1.0, activation)
    return acc


@triton.jit
def _store_tile(
    acc,
    out,
    out_scales,
    pair,
    row_mask,
    column_tile,
    columns: tl.constexpr,
    cols: tl.constexpr,
    largest: tl.constexpr,
):
    """Store rows of out, in 8 bits if there are scales."""
    if out_scales is not None:
        acc, scale = scaled_to_8_bits(acc, largest)
        scale_pointers = out_scales + pair.to(tl.int64) * (columns // cols) + column_tile
        tl.store(scale_pointers, scale, mask=row_mask)
    place = column_tile * cols + tl.arange(0, cols)[None, :]
    out_pointers = out + pair.to(tl.int64)[:, None] * columns + place
    out_mask = row_mask[:, None] & (place < columns)
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _tile(
    x,
    x_scales,
    row_mask,
    leaf,
    size: tl.constexpr,
    depth: tl.constexpr,
    scaled: tl.constexpr,
    swapped: tl.constexpr,
    stages: tl.constexpr,
):
    """Products [rows, lines] of rows of x with lines of the weights. With scales of x, a
    pass is within one group.
    """
    rows: tl.constexpr = x.shape[0]
    lines: tl.constexpr = leaf[0].shape[0]
    acc = tl.zeros([lines, rows] if swapped else [rows, lines], tl.float32)
    full: tl.constexpr = size % depth == 0
    for k in tl.range(0, size, depth, num_stages=stages):
        lane = k + tl.arange(0, depth)[None, :]
        w = load_tile(leaf, k, size, full, depth, scaled)
        y = tl.load(x + lane, mask=row_mask & ((lane < size) | full), other=0.0)
        y_scale = None
        if x_scales is not None:
            y_scale = tl.load(x_scales + k // scaled, mask=row_mask, other=0.0)
        acc = add_products(acc, w, y, swapped, y_scale)
    return tl.trans(acc) if swapped else acc


@triton.jit
def combine(
    pair_outputs,
    residual,
    residual_stride,
    ids,
    weights,
    size,
    top_k: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [tokens, tiles of a row]: residual += the weighted sum of pair_outputs
    [pairs, size],
    in the order of the pairs.
    """
    follow()
    token = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = lane < size
    out_pointers = residual + token * residual_stride + lane
    before = tl.load(out_pointers, mask=mask, other=0.0)
    total = tl.zeros([tile], tl.float32)
    for i in tl.static_range(top_k):
        pair = token * top_k + i
        is_pair = tl.load(ids + pair) >= 0
        limit = tl.where(is_pair, size, 0)
        pair_output = tl.load(
            pair_outputs + pair * size + lane, mask=lane < limit, other=0.0
        )
        if weights is None:
            total += pair_output.to(tl.float32)
        else:
            share = tl.load(weights + pair, mask=is_pair, other=0.0)
            total += share * pair_output.to(tl.float32)
    total += before
    tl.store(out_pointers, total.to(residual.dtype.element_ty), mask=mask)
