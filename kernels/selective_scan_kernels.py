"""The kernel of selective_scan.py."""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels.gated_rule_kernels import step_size, to_next
from minfer.kernels.head_gates import activated
from minfer.kernels.paged_states import copy_states
from minfer.kernels.pdl import early, follow
from minfer.kernels.scan_arguments import ScanArguments
from minfer.kernels.state_kernels import unit_pointers
from minfer.kernels.state_work import StateChunks, StateWork

# Channels of a program; not measured. With 16 numbers a channel, a thread has 8 numbers
# of the state; with more of them there would be few programs.
CHANNELS: Final = 64
WARPS: Final = 4


@triton.jit(
    do_not_specialize=["first_page", "first_unit", "first_token", "lead", "stride"]
)
def _scan(
    x,
    raw,
    b,
    c,
    gate,
    bias,
    rates,
    skip,
    out,
    rows,
    starts,
    counts,
    offsets,
    table,
    pages,
    x_stride,
    raw_stride,
    b_stride,
    c_stride,
    gate_stride,
    table_stride,
    page_stride,
    first_page,
    first_unit,
    per_page,
    first_token,
    lead,
    stride,
    channels,
    writes: tl.constexpr,
    unit: tl.constexpr,
    size: tl.constexpr,
    pad: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [tiles of channels, rows]. `unit` is the channels of a unit, `size` the
    numbers of a channel. Without `counts`, a row has one token, `first_token` and its
    number. With `lead` and `stride`, inputs are spaced as `DraftSpacing` says.
    """
    row = tl.program_id(1)
    channel = tl.program_id(0) * tile + tl.arange(0, tile)
    lane = tl.arange(0, pad)
    mask = channel < channels
    lane_mask = lane < size
    state_mask = lane_mask[:, None] & mask[None, :]
    rate_pointers = rates + channel[None, :] * size + lane[:, None]
    rate = tl.load(rate_pointers, mask=state_mask, other=0.0)
    shift = tl.load(bias + channel, mask=mask, other=0.0)
    factor = tl.load(skip + channel, mask=mask, other=0.0)
    follow()
    token = row.to(tl.int64) + first_token
    count = 1
    if counts is not None:
        token = tl.load(offsets + row).to(tl.int64)
        count = tl.load(counts + row)
    if count == 0:
        return
    state_pointers = unit_pointers(
        pages,
        page_stride,
        table + tl.load(rows + row).to(tl.int64) * table_stride,
        first_page,
        first_unit + channel // unit,
        per_page,
        size * unit,
        mask,
    )
    state_pointers = (state_pointers + channel % unit)[None, :] + lane[:, None] * unit
    old_end = tl.where(tl.load(starts + row) != 0, channels, 0)
    is_old = state_mask & (channel < old_end)[None, :]
    state = tl.load(state_pointers, mask=is_old, other=0.0).to(tl.float32)
    x += token * x_stride + channel
    raw += token * raw_stride + channel
    gate += token * gate_stride + channel
    b += token * b_stride + lane
    c += token * c_stride + lane
    out += token * channels + channel
    for number in range(count):
        ahead = to_next(number, lead, stride)
        value = tl.load(x, mask=mask, other=0.0).to(tl.float32)
        step = step_size(tl.load(raw, mask=mask, other=0.0), shift, 0.0, float("inf"))
        written = tl.load(b, mask=lane_mask, other=0.0).to(tl.float32)
        read = tl.load(c, mask=lane_mask, other=0.0).to(tl.float32)
        state = state * tl.exp(-rate * step[None, :])
        state += written[:, None] * (step * value)[None, :]
        result = tl.sum(state * read[:, None], 0) + value * factor
        gates = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
        result *= gates * activated(gates, "sigmoid")
        tl.store(out, result, mask=mask)
        x += ahead * x_stride
        raw += ahead * raw_stride
        gate += ahead * gate_stride
        b += ahead * b_stride
        c += ahead * c_stride
        out += ahead * channels
    tl.store(state_pointers, state, mask=state_mask & writes)


def launch(scan: ScanArguments, out: Tensor) -> None:
    """Launch `selective_scan` of decode rows, and of chunks, into `out`."""
    x, raw, b, c, gate, weights, units, work = scan
    channels = x.shape[1]
    size, unit = units.unit_shape
    arguments: dict[str, Any] = {
        "x": x,
        "raw": raw,
        "b": b,
        "c": c,
        "gate": gate,
        "bias": weights.bias,
        "rates": weights.rates,
        "skip": weights.skip,
        "out": out,
        "table": work.table,
        "pages": units.pages,
        "x_stride": x.stride(0),
        "raw_stride": raw.stride(0),
        "b_stride": b.stride(0),
        "c_stride": c.stride(0),
        "gate_stride": gate.stride(0),
        "table_stride": work.table.stride(0),
        "page_stride": units.pages.stride(0),
        "first_page": units.first_page,
        "first_unit": units.first_unit,
        "per_page": units.pages.shape[1],
        "channels": channels,
        "unit": unit,
        "size": size,
        "pad": triton.next_power_of_2(size),
        "tile": CHANNELS,
        "num_warps": WARPS,
        "launch_pdl": early(x),
    }
    if len(work.rows):
        _launch_rows(arguments, work, None, writes=True)
    for chunks, writes in work.all_chunks:
        _launch_rows(arguments, work, chunks, writes=writes)
        copy_states(units, work.table, chunks.rows, chunks.saved)


def _launch_rows(
    arguments: dict[str, Any],
    work: StateWork,
    chunks: StateChunks | None,
    *,
    writes: bool,
) -> None:
    """Launch the scan of decode rows, or of rows of several inputs."""
    rows = work if chunks is None else chunks
    spacing = None if chunks is None else chunks.spacing
    tiles = triton.cdiv(arguments["channels"], CHANNELS)
    _scan[tiles, len(rows.rows)](
        **arguments,
        rows=rows.rows,
        starts=rows.starts,
        counts=None if chunks is None else chunks.counts,
        offsets=None if chunks is None else chunks.offsets,
        first_token=work.first_token if chunks is None else 0,
        lead=None if spacing is None else spacing.lead,
        stride=None if spacing is None else spacing.stride,
        writes=writes,
    )
