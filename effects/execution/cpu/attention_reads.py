"""What the CPU's attention reads in a step: gather indices and masks, made once, with
numpy.

In layers with a sliding window of w, a token at position q attends to positions above q -
w up to q; in layers whose attention is within chunks of w positions, from the first one
of its chunk. Reads are prepared once for each window; blocks outside it are not read, nor
are their ids used, as these blocks may have been released. With sink tokens it attends to
the first tokens of its sequence as well, whose blocks are gathered before those of the
window.

A chunk's mask has a number for each of its tokens and each key. If all masks of a step
are few numbers, they are made once for all layers; else each layer makes its own, one
piece of a chunk after another, so that memory does not grow with the context.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.models.architecture.batch import Batch, Ints
from minfer.effects.models.layout.shapes import MAX_MASK_NUMBERS

Table = NDArray[np.integer]  # [rows, blocks], of int32 or int64
# padded tokens that take as long as the launches of one more group in each layer
SPLIT_COST_TOKENS = 512
MAX_GROUP_TOKENS = 4096  # gathered at once: few megabytes, which stay in the CPU's cache


class LayerKind(NamedTuple):
    """What layers read that share their reads."""

    table: int  # the block table of their pages
    window: int | None
    sink_tokens: int = 0
    chunked: bool = False  # attention is within chunks of `window` positions


class _Limit(NamedTuple):
    """How far back tokens attend."""

    window: int
    sink_tokens: int
    chunked: bool

    def starts(self, positions: Ints) -> Ints:
        """Returns the first position that each attends to, besides sink tokens."""
        if self.chunked:
            return positions // self.window * self.window
        return np.maximum(positions + 1 - self.window, 0)

    def start(self, position: int) -> int:
        """Returns that of one position."""
        if self.chunked:
            return position // self.window * self.window
        return max(0, position + 1 - self.window)


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
class MaskRule:
    """Which keys the tokens of a chunk attend to."""

    first: int  # the position of the first token
    last: int  # one more than that of the last, which is the last key's
    keys: NDArray[np.int64]  # positions
    limit: _Limit

    @property
    def attends_to_all(self) -> bool:
        """Whether all earlier keys are attended to."""
        return self.last <= self.limit.window

    def mask(self) -> Tensor | None:
        """Returns the mask [tokens, keys]; None: all keys are attended to."""
        count = self.last - self.first
        if self.attends_to_all:
            beyond = torch.full((count, count), -torch.inf).triu_(1)
            return F.pad(beyond, (len(self.keys) - count, 0)) if count > 1 else None
        query = np.arange(self.first, self.last)[:, None]
        skipped = self.keys < self.limit.starts(query)
        if self.limit.sink_tokens:
            skipped &= self.keys >= self.limit.sink_tokens
        return _mask((self.keys > query) | skipped)


@frozen(eq=False)
class MaskedPiece:
    """Some tokens of a chunk, and its first `keys` keys, which they attend to."""

    tokens: slice
    keys: int
    mask: Tensor | None  # [tokens, keys] float32; None: causal, or a single token


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
    # The mask [last - first, context - skip] float32, or what it is made of, if it is
    # large; None: causal, or a single input
    rule: Tensor | MaskRule | None

    @property
    def is_causal(self) -> bool:
        """Whether its mask is large, and it attends to all keys up to its tokens' own."""
        return isinstance(self.rule, MaskRule) and self.rule.attends_to_all

    def pieces(self) -> Iterator[MaskedPiece]:
        """Yields the chunk in pieces whose masks are not large, if its own would be."""
        rule, count = self.rule, self.last - self.first
        keys = self.context - self.skip
        if not isinstance(rule, MaskRule):
            yield MaskedPiece(slice(0, count), keys, rule)
            return
        size = max(1, MAX_MASK_NUMBERS // keys)
        for start in range(0, count, size):
            end = min(start + size, count)
            num_keys = keys - (count - end)
            piece_rule = evolve(
                rule,
                first=rule.first + start,
                last=rule.first + end,
                keys=rule.keys[:num_keys],
            )
            yield MaskedPiece(slice(start, end), num_keys, piece_rule.mask())


@frozen(eq=False)
class Reads:
    """What every token attends to, in layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkReads, ...]


def plan_reads(
    batch: Batch, block_size: int, kinds: Sequence[LayerKind]
) -> Mapping[LayerKind, Reads]:
    """Returns what layers read, by their kinds; a window longer than every context limits
    nothing.
    """
    contexts = batch.contexts.numpy().astype(np.int64)
    spans = []
    if (batch_chunks := batch.chunks) is not None:
        columns = (
            batch_chunks.rows,
            batch_chunks.starts,
            batch_chunks.counts,
            batch_chunks.offsets,
        )
        spans = [
            span
            for span in zip(*(column.tolist() for column in columns), strict=True)
            if span[2]
        ]
    longest = max([start + count for _, start, count, _ in spans] + contexts.tolist())
    limits = {kind: (kind.table, _limit(kind, longest)) for kind in kinds}
    numbers = sum(
        count * (min(start, limit.window + limit.sink_tokens) + count)
        for _, limit in set(limits.values())
        for _, start, count, _ in spans
    )
    keeps_masks = numbers <= MAX_MASK_NUMBERS
    reads = {}
    for table_index, limit in set(limits.values()):
        block_table = batch.table[table_index].numpy()
        table = block_table[batch.rows.numpy()]
        groups: tuple[DecodeGroup, ...] = ()
        if len(contexts):
            groups = _groups(table, contexts, block_size, limit)
        chunks = tuple(
            _chunk(
                block_table[row],
                start,
                offset,
                offset + count,
                block_size,
                limit,
                keeps_mask=keeps_masks,
            )
            for row, start, count, offset in spans
        )
        reads[table_index, limit] = Reads(groups, chunks)
    return {kind: reads[limit] for kind, limit in limits.items()}


def _limit(kind: LayerKind, longest: int) -> _Limit:
    """Returns how far back a kind's tokens attend in contexts of up to `longest`."""
    if kind.window is None or kind.window >= longest:
        return _Limit(longest, 0, chunked=False)
    return _Limit(kind.window, kind.sink_tokens, kind.chunked)


def _groups(
    table: Table, contexts: Ints, block_size: int, limit: _Limit
) -> tuple[DecodeGroup, ...]:
    """Split decode rows so that one long context does not pad all the short ones."""
    count, longest, skips = len(contexts), int(contexts.max()), np.zeros_like(contexts)
    sinks = limit.sink_tokens
    if limit.window < longest:
        # Tables of the blocks with sink tokens, then of those from the window on; and the
        # ranges of tokens in them.
        before = -(-sinks // block_size)
        starts = limit.starts(contexts - 1)
        first = np.maximum(starts // block_size, before)
        span = max(int(((contexts - 1) // block_size - first).max()) + 1, 0)
        columns = np.minimum(first[:, None] + np.arange(span), table.shape[1] - 1)
        if sinks:
            ahead = np.broadcast_to(np.arange(before), (count, before))
            columns = np.concatenate((ahead, columns), 1)
        table = np.take_along_axis(table, columns, 1)
        left_out = (first - before) * block_size
        skips, contexts = starts - left_out, contexts - left_out
        longest = int(contexts.max())
    padded = count * longest
    if count == 1 or (
        padded <= MAX_GROUP_TOKENS and padded - int(contexts.sum()) <= SPLIT_COST_TOKENS
    ):
        return (_group(None, table, skips, contexts, block_size, sinks),)
    order = np.argsort(-contexts, kind="stable")
    bounds, widest = [0], longest
    for index, context in enumerate(contexts[order].tolist()):
        full = index > bounds[-1] and (index + 1 - bounds[-1]) * widest > MAX_GROUP_TOKENS
        if full or (
            2 * context < widest
            and (widest - context) * (count - index) > SPLIT_COST_TOKENS
        ):
            bounds.append(index)
            widest = context
    return tuple(
        _group(
            torch.from_numpy(indices),
            table[indices],
            skips[indices],
            contexts[indices],
            block_size,
            sinks,
        )
        for indices in np.split(order, bounds[1:])
    )


def _group(
    rows: Tensor | None,
    table: Table,
    skips: Ints,
    contexts: Ints,
    block_size: int,
    sinks: int,
) -> DecodeGroup:
    """Returns the reads of rows whose table has tokens up to `contexts`, of which they do
    not attend to those from `sinks` to `skips`.
    """
    # quicker than numpy for few
    skip, longest = 0 if sinks else min(skips.tolist()), max(contexts.tolist())
    table = table[:, : -(-longest // block_size)]
    if len(contexts) == 1 and not sinks:
        return DecodeGroup(rows, _blocks(table[0]), skip, longest, None)
    # Padding reads the row's own first block: entries after its last one may be anything.
    used = np.arange(table.shape[1]) * block_size < contexts[:, None]
    ids = torch.from_numpy(np.where(used, table, table[:, :1]).reshape(-1))
    positions = np.arange(skip, longest)
    skipped = positions < skips[:, None]
    if sinks:
        skipped &= positions >= sinks
    mask = _mask((positions >= contexts[:, None]) | skipped)
    return DecodeGroup(
        rows, ids, skip, longest, None if mask is None else mask[:, None, None]
    )


def _chunk(
    table: Table,
    position: int,
    first: int,
    last: int,
    block_size: int,
    limit: _Limit,
    *,
    keeps_mask: bool,
) -> ChunkReads:
    """Returns the reads of packed tokens [first, last), the first of them at position
    `position` of the table's sequence.
    """
    sinks = limit.sink_tokens
    context, before = position + last - first, -(-sinks // block_size)
    # What the first input attends to begins at `start`. The blocks read are those of sink
    # tokens, then those from number `block` on.
    start = limit.start(position)
    block = max(start // block_size, before)
    skip = 0 if sinks else start - block * block_size
    key = np.arange(block * block_size + skip, context)
    used = table[: -(-context // block_size)]
    read = used[block:]
    if sinks:
        key = np.concatenate((np.arange(min(before * block_size, context)), key))
        read = np.concatenate((used[:before], read))
    rule: Tensor | MaskRule | None = None
    if position or context > limit.window:
        rule = MaskRule(position, context, key, limit)
        rule = rule.mask() if keeps_mask else rule
    blocks = _blocks(read) if position else None
    return ChunkReads(first, last, blocks, skip, skip + len(key), rule)


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
