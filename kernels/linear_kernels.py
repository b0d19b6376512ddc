"""The Triton kernel of matrix products of few tokens; fused_linear.py has its theory, and
launches it.
"""

import triton
import triton.language as tl

from minfer.kernels.pdl import arrive, follow, prefetch


@triton.jit
def _tile(weight, norm, k, size: tl.constexpr, depth: tl.constexpr):
    """The operands of a pass besides x: weights, the norm's weights, and their mask."""
    lane = k + tl.arange(0, depth)[None, :]
    inside = (lane < size) | (size % depth == 0)
    w = tl.load(weight + lane, mask=inside, other=0.0)
    n = tl.load(norm + lane, mask=inside, other=0.0) if norm is not None else w
    return w, n, inside


@triton.jit
def _pass(acc, squares, x, there, tile, normed: tl.constexpr):
    """The sums plus a tile's products; those of one row are not yet summed over the
    depth.
    """
    w, n, inside = tile
    y = tl.load(x + tl.arange(0, w.shape[1])[None, :], mask=there & inside, other=0.0)
    if normed:
        wide = y.to(tl.float32)
        squares += wide * wide
        y = wide * n
    if y.shape[0] == 1:
        acc += w.to(tl.float32) * y
    else:
        acc = tl.dot(y.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
    return acc, squares


@triton.jit
def _products(
    x,
    norm,
    weight,
    tiles,
    there,
    first,
    last,
    size: tl.constexpr,
    rows: tl.constexpr,
    lines: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """Sums from `first` to `last`: with `lines` of weights [rows, lines], of squares
    [rows].
    """
    acc = tl.zeros([lines, depth] if rows == 1 else [rows, lines], tl.float32)
    squares = tl.zeros([rows, depth], tl.float32)
    for i in tl.static_range(held):
        at = x + first + i * depth
        acc, squares = _pass(acc, squares, at, there, tiles[i], norm is not None)
    if held == 0:
        for k in tl.range(first, last, depth, num_stages=stages):
            tile = _tile(weight, norm, k, size, depth)
            acc, squares = _pass(acc, squares, x + k, there, tile, norm is not None)
    if rows == 1:
        acc = tl.sum(acc, 1)[None, :]
    return acc, tl.sum(squares, 1)


@triton.jit(do_not_specialize=["tokens"])
def product(
    x,
    norm,
    weight,
    bias,
    out,
    parts,
    arrivals,
    eps,
    tokens,
    columns,
    gated: tl.constexpr,
    size: tl.constexpr,
    rows: tl.constexpr,
    cols: tl.constexpr,
    depth: tl.constexpr,
    splits: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """Grid [tiles of rows, tiles of columns * splits]; all rows contiguous; no norm: out
    +=.
    """
    tile = tl.program_id(1) // splits
    part = tl.program_id(1) % splits
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    column = tile * cols + tl.arange(0, cols)
    where = out + row * columns + column
    mine = (row < tokens) & (column < columns)
    # Gates and their factors alternate. Lines past the end repeat the last: no mask is
    # needed.
    each: tl.constexpr = 1 + gated
    lines: tl.constexpr = cols * each
    line = tl.arange(0, lines)
    line = tl.minimum(tile * cols + line // each, columns - 1) + line % each * columns
    at = weight + line.to(tl.int64)[:, None] * size
    share: tl.constexpr = (size + depth * splits - 1) // (depth * splits) * depth
    first = part * share
    # Operands added at the end are loaded at the start: at the end they would cost a
    # latency.
    start = tl.zeros([rows, lines], tl.float32)
    if bias is not None:
        start += tl.load(bias + line)
    tiles = _early(at, norm, first, size, depth, stages, held)
    follow()
    if norm is None:
        start += tl.load(where, mask=mine, other=0.0)
    acc, total = _products(
        x + row * size,
        norm,
        at,
        tiles,
        row < tokens,
        first,
        tl.minimum(first + share, size),
        size,
        rows,
        lines,
        depth,
        stages,
        held,
    )
    if splits > 1:
        cell = tile * tl.num_programs(0) + tl.program_id(0)
        lot = rows * (lines + 1)
        base = parts + cell.to(tl.int64) * (splits * lot)
        sums = base + tl.arange(0, rows)[:, None] * lines + tl.arange(0, lines)[None, :]
        squares = base + rows * lines + tl.arange(0, rows)
        tl.store(sums + part * lot, acc)
        tl.store(squares + part * lot, total)
        if arrive(arrivals, cell) < splits - 1:
            return
        tl.store(arrivals + cell, 0)  # for the next launch
        acc = tl.zeros_like(acc)
        total = tl.zeros_like(total)
        for i in tl.static_range(splits):
            acc += tl.load(sums + i * lot)
            total += tl.load(squares + i * lot)
    if norm is not None:
        acc *= tl.rsqrt(total / size + eps)[:, None]
    acc += start
    if gated:
        gate, up = tl.split(tl.reshape(acc, [rows, cols, 2]))
        acc = gate / (1 + tl.exp(-gate)) * up
    tl.store(where, acc.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _early(
    weight,
    norm,
    first,
    size: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    held: tl.constexpr,
):
    """The tiles of `held` passes, loaded; if there are none, the first are prefetched to
    the cache.
    """
    tiles = tl.tuple([])
    for i in tl.static_range(held):
        tiles += (_tile(weight, norm, first + i * depth, size, depth),)
    for i in tl.static_range(0 if held else stages):
        ahead = first + i * depth + tl.arange(0, depth // 16) * 16
        prefetch(weight + tl.minimum(ahead, size - 16))
    return tiles
