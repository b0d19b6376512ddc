"""The Triton kernel of matrix products of few tokens; fused_linear.py has its theory, and
launches it.
"""

import triton
import triton.language as tl

from minfer.kernels.leaf_tiles import (
    add_lanes,
    add_products,
    leaf_lines,
    load_tile,
    no_sums,
    prefetch_lines,
)
from minfer.kernels.pdl import arrive, follow

# In tiles of this many rows, what is in `out` would take too many registers during the
# products: it is loaded after these.
MANY_ROWS = tl.constexpr(128)


@triton.jit
def _tile(leaf, norm, k, size: tl.constexpr, depth: tl.constexpr, group: tl.constexpr):
    """The operands of a pass besides x: their mask, weights, and the norm's weights."""
    lane = k + tl.arange(0, depth)[None, :]
    lane_mask = (lane < size) | (size % depth == 0)
    tile = (lane_mask, load_tile(leaf, k, size, size % depth == 0, depth, group))
    if norm is not None:
        n = tl.load(norm + lane, mask=lane_mask, other=0.0)
        tile += (n,)  # type: ignore[assignment]  # a tuple of Triton grows
    return tile


@triton.jit
def _pass(
    acc, squares, x, row_mask, tile, swapped: tl.constexpr, dequantized: tl.constexpr
):
    """The sums plus a tile's products; those of one row are not yet summed over the
    depth.
    """
    depth: tl.constexpr = tile[0].shape[1]
    y = tl.load(x + tl.arange(0, depth)[None, :], mask=row_mask & tile[0], other=0.0)
    dtype: tl.constexpr = y.dtype
    if len(tile) > 2:
        wide = y.to(tl.float32)
        squares += wide * wide
        y = wide * tile[2]
    if y.shape[0] == 1:
        acc = add_lanes(acc, tile[1], y)
    else:
        acc = add_products(acc, tile[1], y.to(dtype), swapped, None, dequantized)
    return acc, squares


@triton.jit
def _products(
    x,
    norm,
    leaf,
    tiles,
    row_mask,
    first,
    last,
    size: tl.constexpr,
    rows: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
    held_passes: tl.constexpr,
    swapped: tl.constexpr,
    dequantized: tl.constexpr,
):
    """Sums from `first` to `last`: with `lines` of weights [rows, lines], of squares
    [rows].
    """
    is_int8: tl.constexpr = x.dtype.element_ty == tl.int8
    if rows == 1:
        acc = no_sums(lines, leaf[0], depth, group)
    else:
        acc = tl.zeros(
            [lines, rows] if swapped else [rows, lines],
            tl.int32 if is_int8 else tl.float32,
        )
    squares = tl.zeros([rows, depth], tl.float32)
    for i in tl.static_range(held_passes):
        x_pointers = x + first + i * depth
        acc, squares = _pass(
            acc, squares, x_pointers, row_mask, tiles[i], swapped, dequantized
        )
    if held_passes == 0:
        for k in tl.range(first, last, depth, num_stages=stages):
            tile = _tile(leaf, norm, k, size, depth, group)
            acc, squares = _pass(
                acc, squares, x + k, row_mask, tile, swapped, dequantized
            )
    if rows == 1:
        acc = tl.sum(acc, 1)[None, :]
    elif swapped:
        acc = tl.trans(acc)
    return acc.to(tl.float32), tl.sum(squares, 1)


@triton.jit(do_not_specialize=["tokens"])
def product(
    x,
    x_scales,
    norm,
    weight,
    scales,
    extras,
    bias,
    out,
    partial_sums,
    arrivals,
    eps,
    tokens,
    columns,
    gated: tl.constexpr,
    add: tl.constexpr,
    size: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    held_passes: tl.constexpr,
    swapped: tl.constexpr,
    dequantized: tl.constexpr,
):
    """Grid [tiles of rows, tiles of columns * splits]; all rows contiguous; x_scales
    [tokens]: what the products of each row are multiplied with; add: to what is in `out`.
    """
    tile = tl.program_id(1) // splits
    split_index = tl.program_id(1) % splits
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    column = tile * cols + tl.arange(0, cols)
    out_pointers = out + row * columns + column
    out_mask = (row < tokens) & (column < columns)
    # Gates and their factors alternate. Lines past the end repeat the last: no mask is
    # needed.
    lines_per_column: tl.constexpr = 1 + gated
    lines: tl.constexpr = cols * lines_per_column
    line = tl.arange(0, lines)
    line = (
        tl.minimum(tile * cols + line // lines_per_column, columns - 1)
        + line % lines_per_column * columns
    )
    leaf = leaf_lines(weight, scales, extras, line, size, group)
    share: tl.constexpr = (size + depth * splits - 1) // (depth * splits) * depth
    first = split_index * share
    # Operands added at the end are loaded at the start: at the end they would cost a
    # latency.
    adds_late: tl.constexpr = rows >= MANY_ROWS
    start = tl.zeros([rows, lines], tl.float32)
    if bias is not None:
        start += tl.load(bias + line)
    factor = 1.0
    if scales is not None and group == 0:
        factor = tl.load(scales + line)
    tiles = _load_early(leaf, norm, first, size, depth, group, stages, held_passes)
    follow()
    if add and not adds_late:
        start += tl.load(out_pointers, mask=out_mask, other=0.0)
    acc, total = _products(
        x + row * size,
        norm,
        leaf,
        tiles,
        row < tokens,
        first,
        tl.minimum(first + share, size),
        size,
        rows,
        lines,
        depth,
        group,
        stages,
        held_passes,
        swapped,
        dequantized,
    )
    if splits > 1:
        tile_index = tile * tl.num_programs(0) + tl.program_id(0)
        split_size = rows * (lines + 1)
        base = partial_sums + tile_index.to(tl.int64) * (splits * split_size)
        sums = base + tl.arange(0, rows)[:, None] * lines + tl.arange(0, lines)[None, :]
        squares = base + rows * lines + tl.arange(0, rows)
        tl.store(sums + split_index * split_size, acc)
        tl.store(squares + split_index * split_size, total)
        if arrive(arrivals, tile_index) < splits - 1:
            return
        tl.store(arrivals + tile_index, 0)  # for the next launch
        acc = tl.zeros_like(acc)
        total = tl.zeros_like(total)
        for i in tl.static_range(splits):
            acc += tl.load(sums + i * split_size)
            total += tl.load(squares + i * split_size)
    if norm is not None:
        acc *= tl.rsqrt(total / size + eps)[:, None]
    if scales is not None and group == 0:
        acc *= factor
    if x_scales is not None:
        acc *= tl.load(x_scales + row, mask=row < tokens, other=0.0)
    acc += start
    if add and adds_late:
        acc += tl.load(out_pointers, mask=out_mask, other=0.0)
    if gated:
        gate, up = tl.split(tl.reshape(acc, [rows, cols, 2]))
        acc = gate / (1 + tl.exp(-gate)) * up
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def _load_early(
    leaf,
    norm,
    first,
    size: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
    held_passes: tl.constexpr,
):
    """The tiles of `held_passes` passes, loaded; if there are none, the first are
    prefetched to the cache.
    """
    tiles = ()
    for i in tl.static_range(held_passes):
        tile = _tile(leaf, norm, first + i * depth, size, depth, group)
        tiles += (tile,)  # type: ignore[assignment]  # a tuple of Triton grows
    for i in tl.static_range(0 if held_passes else stages):
        prefetch_lines(leaf[0], first + i * depth, size, depth)
    return tiles
