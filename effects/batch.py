"""One step's work as tensors: which tokens run, where their KV goes, what each attends to.

Everything that all layers share (slots, gather indices, masks) is computed here once a step with
numpy; a layer then only runs tensor operations. Tokens are packed: first the decode rows, one
token each, then the chunks (rows with several inputs), each contiguous.

In layers with a sliding window of w, a token at position q attends to positions above q - w up to
q. What is read is prepared once for each window; blocks outside it are not looked at, nor are their
ids, as they may have been given back.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Windows = tuple[int | None, ...]

# Splitting decode rows into groups costs a few launches a layer: about as long as it takes to
# gather and attend to this many padded tokens.
SPLIT_COST = 512
# Tokens gathered at once: few megabytes, so that what was gathered is still in the CPU's cache.
GROUP_TOKENS = 4096


@frozen(eq=False)
class Row:
    """Inputs of one sequence: `tokens` at positions start, start + 1, ...

    `table` holds the sequence's block ids in order, at least up to the last input. `sample` is the
    number of its last tokens whose logits are wanted (0 inside a prompt, 1 usually, more to
    verify drafts).
    """

    tokens: Sequence[int] | Ints
    start: int
    table: Sequence[int] | Ints
    sample: int = 1


Pack = tuple[Ints, Ints, Ints]  # tokens, positions, slots
Span = tuple[Row, int, int]  # a chunk: packed tokens from the first to before the second number


@frozen(eq=False)
class DecodeRows:
    """Rows of one input each, as the executor's own CPU tensors; every row is sampled.

    Table entries past a row's last block, or before all windows, are ignored.
    """

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    table: Tensor  # [rows, max_blocks] int32 or int64


@frozen(eq=False)
class DecodeGroup:
    """Decode rows that attend in one call, padded to the longest context among them.

    Of the tokens in its gathered blocks, a row reads those from `skip` to `context`.
    """

    rows: Tensor | None  # [n] indices of decode rows; None: all of them
    blocks: Tensor | slice  # [n * blocks] ids to gather; a slice: consecutive blocks, read in place
    skip: int
    context: int  # padding included
    mask: Tensor | None  # [n, 1, 1, context - skip] float32, 0 or -inf; None: no row is padded


@frozen(eq=False)
class Chunk:
    """Several inputs of one row: packed tokens [first, last), all of whose context is causal."""

    first: int
    last: int
    blocks: Tensor | slice | None  # as in DecodeGroup; None: the chunk is its own whole context
    skip: int  # as in DecodeGroup
    context: int
    mask: Tensor | None  # [last - first, context - skip] float32; None: causal, or a single input


@frozen(eq=False)
class Reads:
    """What every token attends to, in layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


@frozen(eq=False)
class Batch:
    """A packed step, ready for `forward`."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: block * block_size + offset, where each token's KV is written
    sample: Tensor | None  # [sampled] indices of tokens whose logits are wanted; None: every token
    decode: int  # the first `decode` tokens are decode rows
    reads: Mapping[int | None, Reads]  # by window; None: layers of full attention


def make_batch(
    rows: Sequence[Row],
    block_size: int,
    decode: DecodeRows | None = None,
    windows: Windows = (None,),
) -> Batch:
    """Pack `decode` and `rows` into one step, for layers with these `windows` (each named once).

    Logits come out for the decode rows first, then for the sampled tokens of `rows` in their
    order. Without `decode`, rows of one token are batched as decode rows and the order of logits
    is that of `rows` alone. Raises ValueError if there is nothing to run, a row is empty or its
    table is too short.
    """
    if decode is None and not rows:
        raise ValueError("a batch needs at least one row")
    for row in rows:
        _check(row, block_size)
    if decode is None:
        singles = [i for i, row in enumerate(rows) if len(row.tokens) == 1]
        packed = _pack_singles([rows[i] for i in singles])
    else:
        singles = []
        packed = (decode.tokens.numpy(), decode.positions.numpy(), decode.table.numpy())
    tokens, positions, table = packed
    head = (tokens, positions, _slots(table, positions, block_size))
    alone = not rows if decode is not None else len(singles) == len(rows)
    spans: list[Span] = []
    sample = None
    if not alone or not all(row.sample for row in rows):
        # Not a steady decode, in which there is nothing to append and every token is sampled.
        first = [] if decode is None else [np.arange(len(tokens))]
        head, spans, sample = _with_chunks(rows, singles, head, first, block_size)
    inputs, places, where = map(torch.from_numpy, head)
    reads = _reads(table, positions + 1, spans, block_size, windows)
    return Batch(inputs, places, where, sample, len(tokens), reads)


def _with_chunks(
    rows: Sequence[Row], singles: list[int], head: Pack, wanted: list[Ints], block_size: int
) -> tuple[Pack, list[Span], Tensor]:
    """Append the rows that are not in `head` as chunks, and to `wanted` the sampled tokens."""
    at = len(head[0])
    place = {row: index for index, row in enumerate(singles)}
    parts, spans = [head], []
    for i, row in enumerate(rows):
        if i in place:
            last = place[i] + 1
        else:
            last = at + len(row.tokens)
            spans.append((row, at, last))
            positions = np.arange(row.start, row.start + last - at)
            table = np.asarray(row.table, np.int64)
            slots = table[positions // block_size] * block_size + positions % block_size
            parts.append((np.asarray(row.tokens, np.int64), positions, slots))
            at = last
        wanted.append(np.arange(last - row.sample, last))
    tokens, positions, slots = map(np.concatenate, zip(*parts, strict=True))
    return (tokens, positions, slots), spans, torch.from_numpy(np.concatenate(wanted))


def _check(row: Row, block_size: int) -> None:
    count = len(row.tokens)
    if not 0 <= row.sample <= count or count == 0 or row.start < 0:
        raise ValueError(
            f"a row needs tokens, a start of 0 or more and a sample between 0 and its "
            f"{count} tokens; found start {row.start}, sample {row.sample}"
        )
    if len(row.table) * block_size < row.start + count:
        raise ValueError(
            f"a table of {len(row.table)} blocks of {block_size} is too short for "
            f"positions up to {row.start + count - 1}"
        )


def _pack_singles(rows: list[Row]) -> tuple[Ints, Ints, Ints]:
    tokens = np.array([row.tokens[0] for row in rows], np.int64)
    positions = np.array([row.start for row in rows], np.int64)
    table = np.zeros((len(rows), max((len(row.table) for row in rows), default=1)), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row.table)] = row.table
    return tokens, positions, table


def _slots(table: NDArray[Any], positions: Ints, block_size: int) -> Ints:
    blocks = table[np.arange(len(positions)), positions // block_size].astype(np.int64, copy=False)
    slots: Ints = blocks * block_size + positions % block_size
    return slots


def _reads(
    table: NDArray[Any], contexts: Ints, spans: list[Span], block_size: int, windows: Windows
) -> dict[int | None, Reads]:
    """What layers read, by window; a window that reaches past every context limits nothing."""
    longest = 0
    if windows != (None,):
        longest = max((row.start + last - first for row, first, last in spans), default=0)
        longest = max(longest, int(contexts.max(initial=0)))
    limits = {w: None if w is None or w >= longest else w for w in windows}
    reads = {}
    for limit in set(limits.values()):
        groups = _groups(table, contexts, block_size, limit) if len(contexts) else ()
        chunks = tuple(_chunk(row, a, b, block_size, limit) for row, a, b in spans)
        reads[limit] = Reads(groups, chunks)
    return {window: reads[limit] for window, limit in limits.items()}


def _groups(
    table: NDArray[Any], contexts: Ints, block_size: int, window: int | None
) -> tuple[DecodeGroup, ...]:
    """Split decode rows so that one long context does not pad all the short ones."""
    skips = None
    if window is not None:
        table, skips, contexts = _in_window(table, contexts, block_size, window)
    count, longest = len(contexts), int(contexts.max())
    padded = count * longest
    if (padded <= GROUP_TOKENS and padded - int(contexts.sum()) <= SPLIT_COST) or count == 1:
        return (_group(None, table, skips, contexts, block_size),)
    order = np.argsort(-contexts, kind="stable")
    bounds, widest = [0], longest
    for at, context in enumerate(contexts[order].tolist()):
        full = at > bounds[-1] and (at + 1 - bounds[-1]) * widest > GROUP_TOKENS
        if full or (2 * context < widest and (widest - context) * (count - at) > SPLIT_COST):
            bounds.append(at)
            widest = context
    return tuple(
        _group(order[a:b], table, skips, contexts, block_size)
        for a, b in zip(bounds, [*bounds[1:], count], strict=True)
    )


def _in_window(
    table: NDArray[Any], contexts: Ints, block_size: int, window: int
) -> tuple[NDArray[Any], Ints, Ints]:
    """Each row's table from its window on, and between which of its tokens the window is."""
    starts = np.maximum(contexts - window, 0)
    first = starts // block_size
    span = int(((contexts - 1) // block_size - first).max()) + 1
    columns = np.minimum(first[:, None] + np.arange(span), table.shape[1] - 1)
    before = first * block_size
    return np.take_along_axis(table, columns, 1), starts - before, contexts - before


def _group(
    rows: Ints | None, table: NDArray[Any], skips: Ints | None, contexts: Ints, block_size: int
) -> DecodeGroup:
    if rows is not None:
        table, contexts = table[rows], contexts[rows]
        skips = None if skips is None else skips[rows]
    longest = int(contexts.max())
    skip = 0 if skips is None else int(skips.min())
    span = -(-longest // block_size)
    index = None if rows is None else torch.from_numpy(rows)
    table = table[:, :span]
    if len(contexts) == 1:
        return DecodeGroup(index, _blocks(table[0]), skip, longest, None)
    # Padding reads the row's own first block: entries past its last one may be anything.
    used = np.arange(span) * block_size < contexts[:, None]
    ids = torch.from_numpy(np.where(used, table, table[:, :1]).reshape(-1))
    mask = None
    uneven = skips is not None and int(skips.max()) > skip
    if uneven or int(contexts.min()) < longest:
        at = torch.arange(skip, longest)
        beyond = at >= torch.from_numpy(contexts)[:, None]
        if skips is not None:
            beyond |= at < torch.from_numpy(skips)[:, None]
        mask = _mask(beyond)[:, None, None]
    return DecodeGroup(index, ids, skip, longest, mask)


def _chunk(row: Row, first: int, last: int, block_size: int, window: int | None) -> Chunk:
    context = row.start + last - first
    # Where the window of the first input begins, and the block that this is in.
    start = 0 if window is None else max(0, row.start + 1 - window)
    block, before = start // block_size, start // block_size * block_size
    blocks = mask = None
    if row.start:
        blocks = _blocks(np.asarray(row.table[block : -(-context // block_size)]))
    if last - first > 1 and (row.start or (window is not None and context > window)):
        key, query = torch.arange(start, context), torch.arange(row.start, context)[:, None]
        beyond = key > query
        if window is not None:
            beyond |= key <= query - window
        mask = _mask(beyond)
    return Chunk(first, last, blocks, start - before, context - before, mask)


def _mask(beyond: Tensor) -> Tensor:
    """0 for what is attended to and -inf for what is `beyond`: float32, added to the scores."""
    return torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)


def _blocks(ids: NDArray[Any]) -> Tensor | slice:
    """Block ids as an index, or as a slice if they are consecutive and need no gathering."""
    if len(ids) == 1 or (ids[1:] - ids[:-1] == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(ids))
