"""What the CPU's attention reads in a step: gather indices and masks, made once, with
numpy.

In layers with a sliding window of w, a token at position q attends to positions above q -
w up to q. Reads are prepared once for each window; blocks outside it are not read, nor
are their ids used, as these blocks may have been released. With sink tokens it attends to
the first tokens of its sequence as well, whose blocks are gathered before those of the
window.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.models.batch import Batch, Ints

Table = NDArray[np.integer]  # [rows, blocks], of int32 or int64
# a block table, and the window and the sink tokens of its layers
Kind = tuple[int, int | None, int]

# padded tokens that take as long as the launches of one more group in each layer
SPLIT_COST = 512
GROUP_TOKENS = 4096  # gathered at once: few megabytes, which stay in the CPU's cache


@frozen(eq=False)
class DecodeGroup:
    """Decode rows that attend in one call, padded to the longest context among them."""

    rows: Tensor | None  # [n] indices of decode rows; None: all of them
    # [n * blocks] ids to gather; a slice: consecutive blocks, read in place
    blocks: Tensor | slice
    skip: int  # of the tokens in its blocks, a row reads those from `skip` to `context`
    context: int  # padding included
    # [n, 1, 1, context - skip] float32, 0 or -inf; None: no row is padded
    mask: Tensor | None


@frozen(eq=False)
class ChunkReads:
    """Several inputs of one row: packed tokens [first, last), all of whose context is
    causal.
    """

    first: int
    last: int
    # as in DecodeGroup; None: the chunk has no earlier context
    blocks: Tensor | slice | None
    skip: int  # as in DecodeGroup
    context: int
    # [last - first, context - skip] float32; None: causal, or a single input
    mask: Tensor | None


@frozen(eq=False)
class Reads:
    """What every token attends to, in layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkReads, ...]


def plan_reads(
    batch: Batch, block_size: int, kinds: Sequence[Kind]
) -> Mapping[Kind, Reads]:
    """Returns what layers read, by block table and window; a window longer than every
    context limits nothing.
    """
    contexts = batch.contexts.numpy().astype(np.int64)
    spans = []
    if (found := batch.chunks) is not None:
        parts = (found.rows, found.starts, found.counts, found.offsets)
        spans = [one for one in zip(*(p.tolist() for p in parts), strict=True) if one[2]]
    longest = max([start + count for _, start, count, _ in spans] + contexts.tolist())
    limits = {
        (t, w, sinks): (t, longest, 0) if w is None or w >= longest else (t, w, sinks)
        for t, w, sinks in kinds
    }
    reads = {}
    for which, limit, sinks in set(limits.values()):
        whole = batch.table[which].numpy()
        table = whole[batch.rows.numpy()]
        groups: tuple[DecodeGroup, ...] = ()
        if len(contexts) and sinks:
            groups = _groups_with_sinks(table, contexts, block_size, limit, sinks)
        elif len(contexts):
            groups = _groups(table, contexts, block_size, limit)
        chunks = tuple(
            _chunk(whole[row], start, offset, offset + count, block_size, limit, sinks)
            for row, start, count, offset in spans
        )
        reads[which, limit, sinks] = Reads(groups, chunks)
    return {kind: reads[limit] for kind, limit in limits.items()}


def _groups(
    table: Table, contexts: Ints, block_size: int, window: int
) -> tuple[DecodeGroup, ...]:
    """Split decode rows so that one long context does not pad all the short ones."""
    count, longest, skips = len(contexts), int(contexts.max()), np.zeros_like(contexts)
    if window < longest:
        # Tables from the window on, and the range of tokens in them.
        starts = np.maximum(contexts - window, 0)
        first = starts // block_size
        span = int(((contexts - 1) // block_size - first).max()) + 1
        columns = np.minimum(first[:, None] + np.arange(span), table.shape[1] - 1)
        table = np.take_along_axis(table, columns, 1)
        skips, contexts = starts - first * block_size, contexts - first * block_size
        longest = int(contexts.max())
    padded = count * longest
    if count == 1 or (
        padded <= GROUP_TOKENS and padded - int(contexts.sum()) <= SPLIT_COST
    ):
        return (_group(None, table, skips, contexts, block_size),)
    order = np.argsort(-contexts, kind="stable")
    bounds, widest = [0], longest
    for at, context in enumerate(contexts[order].tolist()):
        full = at > bounds[-1] and (at + 1 - bounds[-1]) * widest > GROUP_TOKENS
        if full or (
            2 * context < widest and (widest - context) * (count - at) > SPLIT_COST
        ):
            bounds.append(at)
            widest = context
    return tuple(
        _group(
            torch.from_numpy(part), table[part], skips[part], contexts[part], block_size
        )
        for part in np.split(order, bounds[1:])
    )


def _groups_with_sinks(
    table: Table, contexts: Ints, block_size: int, window: int, sinks: int
) -> tuple[DecodeGroup, ...]:
    """Decode rows whose columns are the blocks of sink tokens, then those of the window;
    few rows at once, as in `_groups`.
    """
    before, last = -(-sinks // block_size), contexts - 1
    first = np.maximum(np.maximum(contexts - window, 0) // block_size, before)
    span = max(int((last // block_size - first).max()) + 1, 0)
    ahead = np.broadcast_to(np.arange(before), (len(first), before))
    columns = np.concatenate((ahead, first[:, None] + np.arange(span)), 1)
    # Padding reads the row's own first block.
    used = columns * block_size <= last[:, None]
    table = np.take_along_axis(table, np.where(used, columns, 0), 1)
    at = columns[:, :, None] * block_size + np.arange(block_size)
    at = at.reshape(len(first), -1)
    beyond = at > last[:, None]
    beyond |= (at <= last[:, None] - window) & (at >= sinks)
    few = max(1, GROUP_TOKENS // at.shape[1])
    return tuple(
        DecodeGroup(
            None if few >= len(first) else torch.from_numpy(part),
            torch.from_numpy(np.ascontiguousarray(table[part]).reshape(-1)),
            0,
            at.shape[1],
            None if (mask := _mask(beyond[part])) is None else mask[:, None, None],
        )
        for part in np.split(np.arange(len(first)), range(few, len(first), few))
    )


def _group(
    rows: Tensor | None, table: Table, skips: Ints, contexts: Ints, block_size: int
) -> DecodeGroup:
    # quicker than numpy for few
    skip, longest = min(skips.tolist()), max(contexts.tolist())
    table = table[:, : -(-longest // block_size)]
    if len(contexts) == 1:
        return DecodeGroup(rows, _blocks(table[0]), skip, longest, None)
    # Padding reads the row's own first block: entries after its last one may be anything.
    used = np.arange(table.shape[1]) * block_size < contexts[:, None]
    ids = torch.from_numpy(np.where(used, table, table[:, :1]).reshape(-1))
    at = np.arange(skip, longest)
    mask = _mask((at >= contexts[:, None]) | (at < skips[:, None]))
    return DecodeGroup(
        rows, ids, skip, longest, None if mask is None else mask[:, None, None]
    )


def _chunk(
    table: Table,
    at: int,
    first: int,
    last: int,
    block_size: int,
    window: int,
    sinks: int,
) -> ChunkReads:
    """Returns the reads of packed tokens [first, last), the first of them at position
    `at` of the table's sequence.
    """
    if sinks:
        return _chunk_with_sinks(table, at, first, last, block_size, window, sinks)
    context = at + last - first
    # The window of the first input begins at `start`, in block number `block`.
    start = max(0, at + 1 - window)
    block, before = start // block_size, start // block_size * block_size
    blocks = mask = None
    if at:
        blocks = _blocks(table[block : -(-context // block_size)])
    if at or context > window:
        key, query = np.arange(start, context), np.arange(at, context)[:, None]
        mask = _mask((key > query) | (key <= query - window))
    return ChunkReads(first, last, blocks, start - before, context - before, mask)


def _chunk_with_sinks(
    table: Table,
    at: int,
    first: int,
    last: int,
    block_size: int,
    window: int,
    sinks: int,
) -> ChunkReads:
    """As `_chunk`: of the blocks of sink tokens, then of those from the window of the
    first input on.
    """
    context, before = at + last - first, -(-sinks // block_size)
    block = max((at + 1 - window) // block_size, before)
    here = np.arange(block * block_size, context)
    key = np.concatenate((np.arange(min(before * block_size, context)), here))
    query = np.arange(at, context)[:, None]
    mask = _mask((key > query) | ((key <= query - window) & (key >= sinks)))
    blocks = None
    if at:
        behind = table[block : -(-context // block_size)]
        blocks = _blocks(np.concatenate((table[:before], behind)))
    return ChunkReads(first, last, blocks, 0, len(key), mask)


def _mask(beyond: NDArray[np.bool_]) -> Tensor | None:
    """Returns 0 where attended to and -inf where `beyond`: float32, added to the
    scores.
    """
    if not beyond.any():
        return None
    return torch.from_numpy(np.where(beyond, np.float32(-np.inf), np.float32(0)))


def _blocks(ids: Table) -> Tensor | slice:
    """Returns block ids as an index, or as a slice if they are consecutive and need no
    gathering.
    """
    if len(ids) == 1 or (ids[1:] - ids[:-1] == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(ids))
