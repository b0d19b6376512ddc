"""The state of rows on the device, read and changed in one launch each.

Theory. All that a row needs between steps (last token, next position, sampling, block
table) is in one int32 *arena*, so a step's changes are (index, value) pairs of any kind:
one packed copy and one scatter. `gather` collects the inputs of a step's rows in the
batch's own buffers; `advance` writes back the sampled tokens. Padding rows of a graph's
batch size are the scratch row, which never advances.
"""

import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton, plain
from minfer.kernels.pdl import early, follow
from minfer.kernels.row_state import RowTensors, StepInputs

BLOCK = 256  # entries of a program


@triton.jit(do_not_specialize=["count"])
def _scatter(arena, pairs, count, block: tl.constexpr):
    follow()
    lane = tl.program_id(0) * block + tl.arange(0, block)
    mask = lane < count
    index = tl.load(pairs + lane, mask, 0)
    value = tl.load(pairs + count + lane, mask, 0)
    tl.store(arena + index, value, mask)


def scatter(arena: Tensor, pairs: Tensor) -> None:
    """arena[pairs[i]] = pairs[n + i] for the n = len(pairs) / 2 pairs; all int32.

    If an index occurs twice, one of its values is kept.
    """
    count = len(pairs) // 2
    if not on_triton(arena):
        plain.scatter(arena, pairs)
        return
    _scatter[triton.cdiv(count, BLOCK),](
        arena=arena,
        pairs=pairs,
        count=count,
        block=BLOCK,
        launch_pdl=early(pairs),
    )


@triton.jit(do_not_specialize=["extra_stride", "decode_rows", "count", "slots_stride"])
def _gather(
    rows,
    extra,
    extra_stride,
    last,
    next_,
    table,
    table_stride,
    row_stride,
    block_size,
    decode_rows,
    count,
    tokens,
    positions,
    ahead,
    slots,
    slots_stride,
    tables: tl.constexpr,
    block: tl.constexpr,
):
    follow()
    lane = tl.program_id(0) * block + tl.arange(0, block)
    is_decode = lane < decode_rows
    mask = lane < count
    is_extra = mask & (lane >= decode_rows)
    extra_pointers = extra + lane - decode_rows
    row = tl.load(rows + lane, is_decode, 0) + tl.load(
        extra_pointers + 2 * extra_stride, is_extra, 0
    )
    position = tl.load(next_ + row, is_decode, 0) + tl.load(
        extra_pointers + extra_stride, is_extra, 0
    )
    token = tl.load(last + row, is_decode, 0) + tl.load(extra_pointers, is_extra, 0)
    tl.store(tokens + lane, token, mask)
    tl.store(positions + lane, position, mask)
    tl.store(ahead + lane, position + 1, mask)
    entry = table + row * row_stride + position // block_size
    for i in tl.static_range(tables):
        page = tl.load(entry + i * table_stride, mask, 0).to(tl.int64)
        slot = page * block_size + position % block_size
        tl.store(slots + i * slots_stride + lane, slot, mask)


def gather(
    rows: Tensor,
    extra: Tensor | None,
    state: RowTensors,
    block_size: int,
    out: StepInputs,
) -> None:
    """Inputs of a step: of decode rows, then prefill tokens.

    `rows` [decode rows] int32: their last tokens are inputs. `extra` [3, n] int32:
    tokens, positions and rows of the others, or None. Writes `out`, [decode rows + n]
    each.
    """
    if not on_triton(rows):
        plain.gather(rows, extra, state, block_size, out)
        return
    _gather[triton.cdiv(len(out.tokens), BLOCK),](
        rows=rows,
        extra=rows if extra is None else extra,  # a kernel needs a tensor
        extra_stride=0 if extra is None else extra.stride(0),
        last=state.last,
        next_=state.next,
        table=state.table,
        table_stride=state.table.stride(0),
        row_stride=state.table.stride(1),
        block_size=block_size,
        decode_rows=len(rows),
        count=len(out.tokens),
        tokens=out.tokens,
        positions=out.positions,
        ahead=out.ahead,
        slots=out.slots,
        slots_stride=out.slots.stride(0),
        tables=len(state.table),
        block=BLOCK,
        launch_pdl=early(rows),
    )


@triton.jit(do_not_specialize=["scratch", "count"])
def _advance(
    rows,
    positions,
    drawn,
    broken,
    last,
    next_,
    scratch,
    out,
    count,
    block: tl.constexpr,
):
    follow()
    lane = tl.program_id(0) * block + tl.arange(0, block)
    mask = lane < count
    row = tl.load(rows + lane, mask, 0)
    token = tl.load(drawn + lane, mask, 0)
    is_stored = mask & (row != scratch)
    tl.store(last + row, token, is_stored)
    tl.store(next_ + row, tl.load(positions + lane, mask, 0), is_stored)
    tl.store(out + lane, token - tl.load(broken + lane, mask, 0), mask)


def advance(
    rows: Tensor,
    positions: Tensor,
    drawn: Tensor,
    broken: Tensor,
    state: RowTensors,
    out: Tensor,
) -> None:
    """Store what rows sampled: their last token, and its position; not for the scratch
    row.

    rows, positions, drawn and broken are [rows] int32. `out` gets the tokens too, less
    `broken`.
    """
    if not on_triton(rows):
        plain.advance(rows, positions, drawn, broken, state, out)
        return
    _advance[triton.cdiv(len(rows), BLOCK),](
        rows=rows,
        positions=positions,
        drawn=drawn,
        broken=broken,
        last=state.last,
        next_=state.next,
        scratch=state.scratch,
        out=out,
        count=len(rows),
        block=BLOCK,
        launch_pdl=early(rows),
    )
