"""The Triton kernels of adapters; lora.py has their theory, and launches them.

A row is a token, or a pair of a token and one of its experts: number token * top_k + k. A
group is a slot, or a slot and an expert: number slot * experts + expert. `sums` [splits,
rows, parts, lanes] are the shrinks by the A's of a matrix, in float32, of which each
split has some inputs; what is behind an adapter's rank is not written, and not read.
With `norm`, factors [size] of RMSNorm, x are rows before it: `squares` [splits, rows,
parts] are the sums of their squares, by which expands are scaled.
"""

import triton
import triton.language as tl

from minfer.kernels.pdl import arrive, follow


@triton.jit(do_not_specialize=["rows", "max_tiles"])
def group_rows(
    slots,
    ids,
    places,
    starts,
    tiles,
    counts,
    rows,
    max_tiles,
    top_k: tl.constexpr,
    experts: tl.constexpr,
    groups: tl.constexpr,
    tile: tl.constexpr,
    chunk: tl.constexpr,
    lanes: tl.constexpr,
):
    """Grid [chunks of rows]: which place each row has in its group, and the tiles of
    `tile` places.

    places [rows]. starts [groups]: the rows of the groups before. tiles [1 + 3 *
    max_tiles]: how many there are; then of each its group, its first place, and its rows.
    counts: zeros, for programs that have finished and for each group's rows.
    """
    follow()
    row = tl.program_id(0) * chunk + tl.arange(0, chunk)
    group = tl.load(slots + row // top_k, mask=row < rows, other=-1)
    if ids is not None:
        expert = tl.load(ids + row, mask=row < rows, other=-1)
        is_none = (group < 0) | (expert < 0)
        group = tl.where(is_none, -1, group * experts + expert)
    is_row = group >= 0
    place = tl.atomic_add(counts + 1 + group, 1, mask=is_row, sem="relaxed")
    tl.store(places + row, place, mask=is_row)
    if arrive(counts, 0) == tl.num_programs(0) - 1:
        tl.store(counts, 0)  # for the next launch
        lane = tl.arange(0, lanes)
        lane_mask = lane < groups
        count = tl.load(counts + 1 + lane, mask=lane_mask, other=0)
        tl.store(counts + 1 + lane, tl.zeros_like(count), mask=lane_mask)
        tl.store(starts + lane, tl.cumsum(count, 0) - count, mask=lane_mask)
        num_tiles = (count + tile - 1) // tile
        end = tl.cumsum(num_tiles, 0)
        tl.store(tiles, tl.sum(num_tiles, 0))
        pointers = tiles + 1 + (end - num_tiles)
        for i in range(tl.max(num_tiles, 0)):
            mask = i < num_tiles
            tl.store(pointers + i, lane, mask=mask)
            tl.store(pointers + i + max_tiles, tl.zeros_like(lane) + i * tile, mask=mask)
            left = tl.minimum(count - i * tile, tile)
            tl.store(pointers + i + 2 * max_tiles, left, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def order_rows(
    slots,
    ids,
    places,
    starts,
    order,
    rows,
    top_k: tl.constexpr,
    experts: tl.constexpr,
    chunk: tl.constexpr,
):
    """Grid [chunks of rows]: order [rows] has the rows of one group after another."""
    follow()
    row = tl.program_id(0) * chunk + tl.arange(0, chunk)
    group = tl.load(slots + row // top_k, mask=row < rows, other=-1)
    if ids is not None:
        expert = tl.load(ids + row, mask=row < rows, other=-1)
        is_none = (group < 0) | (expert < 0)
        group = tl.where(is_none, -1, group * experts + expert)
    is_row = group >= 0
    place = tl.load(starts + group, mask=is_row, other=0)
    place += tl.load(places + row, mask=is_row, other=0)
    tl.store(order + place, row, mask=is_row)


@triton.jit
def _group_of_row(slots, ids, row, top_k: tl.constexpr):
    """Returns the slot and the expert of a row; one of them is -1 if nothing is added."""
    slot = tl.load(slots + row // top_k).to(tl.int64)
    expert = tl.zeros_like(slot)
    if ids is not None:
        expert = tl.load(ids + row).to(tl.int64)
    return slot, expert


@triton.jit(do_not_specialize=["rows"])
def shrink_rows(
    x,
    x_stride,
    lora_a,
    slot_stride,
    expert_stride,
    ranks,
    ranks_stride,
    slots,
    ids,
    sums,
    squares,
    norm,
    rows,
    top_k: tl.constexpr,
    x_rows: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    rank: tl.constexpr,
    lanes: tl.constexpr,
    span: tl.constexpr,
    depth: tl.constexpr,
):
    """Grid [rows, parts, splits]: the shrink of a row, of `span` inputs of row number //
    `x_rows` of x.
    """
    row, part, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    follow()
    slot, expert = _group_of_row(slots, ids, row, top_k)
    if (slot >= 0) & (expert >= 0):
        used = tl.load(ranks + slot * ranks_stride + part)
        if used > 0:
            lane = tl.arange(0, lanes)
            line = lora_a + slot * slot_stride + expert * expert_stride
            line += (part * rank + lane)[:, None] * size
            token = x + row // x_rows * x_stride
            total = tl.zeros([lanes, depth], tl.float32)
            square = tl.zeros([depth], tl.float32)
            for k in range(0, span, depth):
                index = split * span + k + tl.arange(0, depth)
                mask = index < size
                a = tl.load(
                    line + index[None, :],
                    mask=(lane < used)[:, None] & mask[None, :],
                    other=0.0,
                )
                y = tl.load(token + index, mask=mask, other=0.0).to(tl.float32)
                if norm is not None:
                    square += y * y
                    y *= tl.load(norm + index, mask=mask, other=0.0).to(tl.float32)
                total += a.to(tl.float32) * y[None, :]
            place = (split * rows + row) * parts + part
            if norm is not None:
                tl.store(squares + place, tl.sum(square, 0))
            places = place * lanes + lane
            tl.store(sums + places, tl.sum(total, 1), mask=lane < used)


@triton.jit(do_not_specialize=["rows"])
def expand_rows(
    lora_b,
    slot_stride,
    expert_stride,
    ranks,
    ranks_stride,
    slots,
    ids,
    sums,
    squares,
    eps,
    out,
    out_stride,
    column_tiles,
    rows,
    top_k: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
    splits: tl.constexpr,
    cols: tl.constexpr,
):
    """Grid [rows, tiles of columns]: out [rows, columns] += the expand of a row.

    column_tiles [tiles, 3]: of each its part, its first column, and the part's end.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = column_tiles + tl.program_id(1) * 3
    part, first, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    follow()
    slot, expert = _group_of_row(slots, ids, row, top_k)
    if (slot >= 0) & (expert >= 0):
        used = tl.load(ranks + slot * ranks_stride + part)
        if used > 0:
            lane = tl.arange(0, lanes)
            shrunk = tl.zeros([lanes], tl.float32)
            square = 0.0
            for split in tl.static_range(splits):
                place = (split * rows + row) * parts + part
                places = place * lanes + lane
                shrunk += tl.load(sums + places, mask=lane < used, other=0.0)
                if squares is not None:
                    square += tl.load(squares + place)
            if squares is not None:
                shrunk *= tl.rsqrt(square / size + eps)
            column = first + tl.arange(0, cols)
            mask = column < end
            line = lora_b + slot * slot_stride + expert * expert_stride
            b = tl.load(
                line + lane[:, None] * columns + column[None, :],
                mask=(lane < used)[:, None] & mask[None, :],
                other=0.0,
            )
            pointers = out + row * out_stride + column
            total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(b.to(tl.float32) * shrunk[:, None], 0)
            tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_tile(
    order,
    starts,
    tiles,
    max_tiles,
    ranks,
    ranks_stride,
    part,
    experts: tl.constexpr,
    tile: tl.constexpr,
):
    """Returns a tile's slot and expert, the rank of its adapter for a part, 0 past the
    last tile; and its rows, with their mask.
    """
    number = tl.program_id(0)
    exists = number < tl.load(tiles)
    group = tl.load(tiles + 1 + number, mask=exists, other=0)
    first = tl.load(tiles + 1 + max_tiles + number, mask=exists, other=0)
    left = tl.load(tiles + 1 + 2 * max_tiles + number, mask=exists, other=0)
    lane = tl.arange(0, tile)
    row_mask = lane < left
    start = tl.load(starts + group) + first
    row = tl.load(order + start + lane, mask=row_mask, other=0).to(tl.int64)
    slot, expert = group.to(tl.int64) // experts, group.to(tl.int64) % experts
    used = tl.load(ranks + slot * ranks_stride + part, mask=exists, other=0)
    return slot, expert, used, row, row_mask


@triton.jit(do_not_specialize=["rows", "max_tiles"])
def shrink_tiles(
    x,
    x_stride,
    lora_a,
    slot_stride,
    expert_stride,
    ranks,
    ranks_stride,
    order,
    starts,
    tiles,
    sums,
    squares,
    norm,
    rows,
    max_tiles,
    x_rows: tl.constexpr,
    experts: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    rank: tl.constexpr,
    lanes: tl.constexpr,
    span: tl.constexpr,
    depth: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    """Grid [tiles of rows, parts, splits]: the shrinks of a tile's rows, as
    `shrink_rows`.
    """
    part, split = tl.program_id(1), tl.program_id(2)
    follow()
    slot, expert, used, row, row_mask = _load_tile(
        order, starts, tiles, max_tiles, ranks, ranks_stride, part, experts, tile
    )
    if used > 0:
        lane = tl.arange(0, lanes)
        line = lora_a + slot * slot_stride + expert * expert_stride
        line += (part * rank + lane)[None, :] * size
        token = x + (row // x_rows)[:, None] * x_stride
        total = tl.zeros([tile, lanes], tl.float32)
        square = tl.zeros([tile], tl.float32)
        for k in tl.range(0, span, depth, num_stages=stages):
            index = split * span + k + tl.arange(0, depth)
            mask = index < size
            a = tl.load(
                line + index[:, None],
                mask=mask[:, None] & (lane < used)[None, :],
                other=0.0,
            )
            y = tl.load(
                token + index[None, :],
                mask=row_mask[:, None] & mask[None, :],
                other=0.0,
            )
            if norm is not None:
                wide = y.to(tl.float32)
                square += tl.sum(wide * wide, 1)
                factors = tl.load(norm + index, mask=mask, other=0.0).to(tl.float32)
                y = (wide * factors[None, :]).to(a.dtype)
            total = tl.dot(y, a, total, input_precision="ieee")
        place = (split * rows + row) * parts + part
        if norm is not None:
            tl.store(squares + place, square, mask=row_mask)
        places = place[:, None] * lanes + lane[None, :]
        tl.store(sums + places, total, mask=row_mask[:, None] & (lane < used)[None, :])


@triton.jit(do_not_specialize=["rows", "max_tiles"])
def expand_tiles(
    lora_b,
    slot_stride,
    expert_stride,
    ranks,
    ranks_stride,
    order,
    starts,
    tiles,
    sums,
    squares,
    eps,
    out,
    out_stride,
    column_tiles,
    rows,
    max_tiles,
    experts: tl.constexpr,
    parts: tl.constexpr,
    size: tl.constexpr,
    columns: tl.constexpr,
    lanes: tl.constexpr,
    splits: tl.constexpr,
    cols: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [tiles of rows, tiles of columns]: out [rows, columns] += the expands of a
    tile's rows. column_tiles: as in `expand_rows`.
    """
    column_tile = column_tiles + tl.program_id(1) * 3
    part = tl.load(column_tile)
    first, end = tl.load(column_tile + 1), tl.load(column_tile + 2)
    follow()
    slot, expert, used, row, row_mask = _load_tile(
        order, starts, tiles, max_tiles, ranks, ranks_stride, part, experts, tile
    )
    if used > 0:
        lane = tl.arange(0, lanes)
        shrunk = tl.zeros([tile, lanes], tl.float32)
        square = tl.zeros([tile], tl.float32)
        for split in tl.static_range(splits):
            place = (split * rows + row) * parts + part
            places = place[:, None] * lanes + lane[None, :]
            mask = row_mask[:, None] & (lane < used)[None, :]
            shrunk += tl.load(sums + places, mask=mask, other=0.0)
            if squares is not None:
                square += tl.load(squares + place, mask=row_mask, other=0.0)
        if squares is not None:
            shrunk *= tl.rsqrt(square / size + eps)[:, None]
        column = first + tl.arange(0, cols)
        column_mask = column < end
        line = lora_b + slot * slot_stride + expert * expert_stride
        b = tl.load(
            line + lane[:, None] * columns + column[None, :],
            mask=(lane < used)[:, None] & column_mask[None, :],
            other=0.0,
        )
        added = tl.dot(shrunk.to(b.dtype), b, input_precision="ieee")
        pointers = out + row[:, None] * out_stride + column[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        total = tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + added
        tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)
