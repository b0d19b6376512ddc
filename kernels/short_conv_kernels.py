"""The kernels of short_conv.py.

Bound by memory: 8,192 tokens of 8,192 channels in 2 bytes are 268 MB in all, 64 us at 4.2
TB/s. A decode row reads and writes its state in place: of 8,192 channels and a width of
4, 131 KB in all.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels.paged_states import PagedUnits, copy_states
from minfer.kernels.pdl import early, follow
from minfer.kernels.state_kernels import find_block, most_blocks, unit_pointers
from minfer.kernels.state_work import StateChunks, StateWork

DECODE_CHANNELS: Final = 512  # of a program
CHUNK_CHANNELS: Final = 128  # of a program
CHUNK_TOKENS: Final = 32  # of a program, at least


@triton.jit
def _activated(x, silu: tl.constexpr):
    if silu:
        x = x / (1 + tl.exp(-x))
    return x


@triton.jit(do_not_specialize=["first_page", "first_unit", "first_token"])
def _decode(
    x,
    weight,
    bias,
    out,
    rows,
    starts,
    table,
    pages,
    x_stride,
    table_stride,
    page_stride,
    first_page,
    first_unit,
    per_page,
    channels,
    first_token,
    units,
    unit: tl.constexpr,
    width: tl.constexpr,
    silu: tl.constexpr,
    height: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [rows, units / height]. `unit` is the channels of a unit."""
    number = tl.program_id(0)
    token = number.to(tl.int64) + first_token
    index = tl.program_id(1) * height + tl.arange(0, height)[:, None]
    lane = tl.arange(0, pad)[None, :]
    channel = index * unit + lane
    mask = (index < units) & (lane < unit)
    newest: tl.constexpr = width - 1
    factor = tl.load(weight + channel * width + newest, mask=mask, other=0.0)
    total = tl.zeros([height, pad], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=mask, other=0.0)
    follow()
    row = tl.load(rows + number).to(tl.int64)
    is_old = mask & (lane < tl.where(tl.load(starts + number) != 0, unit, 0))
    state = unit_pointers(
        pages,
        page_stride,
        table + row * table_stride,
        first_page,
        first_unit + index,
        per_page,
        newest * unit,
        index < units,
    )
    state += lane
    value = tl.load(x + token * x_stride + channel, mask=mask, other=0.0)
    total += value.to(tl.float32) * factor
    for line in tl.static_range(newest):
        before = tl.load(state + line * unit, mask=is_old, other=0.0)
        factor = tl.load(weight + channel * width + line, mask=mask, other=0.0)
        total += before.to(tl.float32) * factor
        if line > 0:
            tl.store(state + (line - 1) * unit, before, mask=mask)
    tl.store(state + (newest - 1) * unit, value, mask=mask)
    tl.store(out + token * channels + channel, _activated(total, silu), mask=mask)


@triton.jit
def _place(number, lead, stride):
    """The places of a chunk's inputs of these numbers, from its first input on."""
    place = number.to(tl.int64)
    if lead is not None:
        place = place * stride + tl.where(number > 0, lead, 0)
    return place


@triton.jit(do_not_specialize=["first_page", "first_unit", "chunks", "lead", "stride"])
def _convolve(
    x,
    weight,
    bias,
    out,
    rows,
    starts,
    counts,
    offsets,
    table,
    pages,
    x_stride,
    table_stride,
    page_stride,
    first_page,
    first_unit,
    per_page,
    channels,
    chunks,
    lead,
    stride,
    writes: tl.constexpr,
    unit: tl.constexpr,
    width: tl.constexpr,
    silu: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    pad: tl.constexpr,
):
    """Grid [blocks of tokens, tiles of channels]. The program of a chunk's first block,
    which alone reads the state, writes it too. With `lead` and `stride`, inputs are
    spaced as `DraftSpacing` says.
    """
    follow()
    chunk, number = find_block(counts, chunks, tl.program_id(0), block, pad)
    if chunk >= chunks:
        return
    channel = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = channel < channels
    count = tl.load(counts + chunk)
    inputs = x + tl.load(offsets + chunk).to(tl.int64) * x_stride + channel
    newest: tl.constexpr = width - 1
    row = tl.load(rows + chunk).to(tl.int64)
    is_old = channel < tl.where(tl.load(starts + chunk) != 0, channels, 0)
    state = unit_pointers(
        pages,
        page_stride,
        table + row * table_stride,
        first_page,
        first_unit + channel // unit,
        per_page,
        newest * unit,
        mask,
    )
    state += channel % unit
    token = number * block + tl.arange(0, block)
    total = tl.zeros([block, tile], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=mask, other=0.0)[None, :]
    for line in tl.static_range(width):
        source = (token + (line - newest))[:, None]
        is_input = (source >= 0) & (source < count) & mask[None, :]
        value = tl.load(
            inputs[None, :] + _place(source, lead, stride) * x_stride,
            mask=is_input,
            other=0.0,
        ).to(tl.float32)
        # Only the first block has inputs before the chunk.
        if number * block < newest - line:
            is_before = (source < 0) & is_old[None, :]
            value += tl.load(
                state[None, :] + (source + newest) * unit, mask=is_before, other=0.0
            ).to(tl.float32)
        factor = tl.load(weight + channel * width + line, mask=mask, other=0.0)
        total += value * factor[None, :]
    out_rows = tl.load(offsets + chunk) + _place(token, lead, stride)
    tl.store(
        out + out_rows[:, None] * channels + channel[None, :],
        _activated(total, silu),
        mask=(token < count)[:, None] & mask[None, :],
    )
    if writes and number == 0:
        tl.debug_barrier()  # all threads have read the state
        for line in tl.static_range(newest):
            kept_token = count - newest + line
            if kept_token >= 0:
                kept = tl.load(
                    inputs + _place(kept_token, lead, stride) * x_stride, mask=mask
                )
            else:
                before = state + (line + count) * unit
                kept = tl.load(before, mask=is_old, other=0.0).to(x.dtype.element_ty)
            tl.store(state + line * unit, kept, mask=mask)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    units: PagedUnits,
    work: StateWork,
    *,
    silu: bool,
) -> None:
    """Launch `short_conv`, into `out`."""
    tokens, channels = x.shape
    arguments: dict[str, Any] = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        "table": work.table,
        "pages": units.pages,
        "x_stride": x.stride(0),
        "table_stride": work.table.stride(0),
        "page_stride": units.pages.stride(0),
        "first_page": units.first_page,
        "first_unit": units.first_unit,
        "per_page": units.pages.shape[1],
        "channels": channels,
        "unit": units.unit_shape[1],
        "width": weight.shape[1],
        "silu": silu,
        "launch_pdl": early(x),
    }
    if len(work.rows):
        _launch_rows(arguments, work, units)
    for chunks, writes in work.all_chunks:
        _launch_chunks(arguments, chunks, tokens, channels, writes=writes)
        copy_states(units, work.table, chunks.rows, chunks.saved)


def _launch_rows(arguments: dict[str, Any], work: StateWork, units: PagedUnits) -> None:
    """Launch the convolution of decode rows."""
    pad = triton.next_power_of_2(units.unit_shape[1])
    height = max(1, DECODE_CHANNELS // pad)
    _decode[len(work.rows), triton.cdiv(units.units, height)](
        **arguments,
        rows=work.rows,
        starts=work.starts,
        first_token=work.first_token,
        units=units.units,
        height=height,
        pad=pad,
    )


def _launch_chunks(
    arguments: dict[str, Any],
    chunks: StateChunks,
    tokens: int,
    channels: int,
    *,
    writes: bool,
) -> None:
    """Launch the convolution of chunks."""
    count, spacing = len(chunks.rows), chunks.spacing
    # The second block reads no state: the program of the first writes it.
    newest = arguments["width"] - 1
    block = max(CHUNK_TOKENS, triton.next_power_of_2(newest))
    grid = most_blocks(tokens, count, block), triton.cdiv(channels, CHUNK_CHANNELS)
    _convolve[grid](
        **arguments,
        rows=chunks.rows,
        starts=chunks.starts,
        counts=chunks.counts,
        offsets=chunks.offsets,
        chunks=count,
        lead=None if spacing is None else spacing.lead,
        stride=None if spacing is None else spacing.stride,
        writes=writes,
        tile=CHUNK_CHANNELS,
        block=block,
        pad=triton.next_power_of_2(count),
    )
