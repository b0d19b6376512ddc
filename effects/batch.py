"""One step's work as tensors: which tokens run, where their KV goes, what each attends to.

Everything that all layers share (slots, gather indices, masks) is computed here once a step with
numpy; a layer then only runs tensor operations. Tokens are packed: first the decode rows, one
token each, then the chunks (rows with several inputs), each contiguous.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]

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


@frozen(eq=False)
class DecodeRows:
    """Rows of one input each, as the executor's own CPU tensors; every row is sampled.

    Table entries past a row's last block are ignored.
    """

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    table: Tensor  # [rows, max_blocks] int32 or int64


@frozen(eq=False)
class DecodeGroup:
    """Decode rows that attend in one call, padded to the longest context among them."""

    rows: Tensor | None  # [n] indices of decode rows; None: all of them
    blocks: Tensor | slice  # [n * blocks] ids to gather; a slice: consecutive blocks, read in place
    context: int  # tokens each row reads, padding included
    mask: Tensor | None  # [n, 1, 1, context] float32, 0 or -inf; None: nothing is padded


@frozen(eq=False)
class Chunk:
    """Several inputs of one row: packed tokens [first, last), all of whose context is causal."""

    first: int
    last: int
    blocks: Tensor | slice | None  # as in DecodeGroup; None: the chunk is its own whole context
    context: int  # tokens that the last input attends to
    mask: Tensor | None  # [last - first, context] float32; None: plain causal or a single input


@frozen(eq=False)
class Batch:
    """A packed step, ready for `forward`."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64: block * block_size + offset, where each token's KV is written
    sample: Tensor | None  # [sampled] indices of tokens whose logits are wanted; None: every token
    decode: int  # the first `decode` tokens are decode rows
    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def make_batch(rows: Sequence[Row], block_size: int, decode: DecodeRows | None = None) -> Batch:
    """Pack `decode` and `rows` into one step.

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
    count = len(tokens)
    slots = _slots(table, positions, block_size)
    groups = _groups(table, positions + 1, block_size) if count else ()
    head = (tokens, positions, slots)
    alone = not rows if decode is not None else len(singles) == len(rows)
    if alone and all(row.sample for row in rows):
        # A steady decode: nothing to append, every token sampled.
        inputs, places, where = map(torch.from_numpy, head)
        return Batch(inputs, places, where, None, count, groups, ())
    return _with_chunks(rows, singles, head, groups, block_size, sample_decode=decode is not None)


def _with_chunks(
    rows: Sequence[Row],
    singles: list[int],
    head: tuple[Ints, Ints, Ints],
    groups: tuple[DecodeGroup, ...],
    block_size: int,
    *,
    sample_decode: bool,
) -> Batch:
    """Append the rows that are not in `head` as chunks, and list the sampled tokens in order."""
    count = at = len(head[0])
    place = {row: index for index, row in enumerate(singles)}
    parts, chunks = [head], []
    wanted = [np.arange(count)] if sample_decode else []
    for i, row in enumerate(rows):
        if i in place:
            last = place[i] + 1
        else:
            last = at + len(row.tokens)
            chunks.append(_chunk(row, at, last, block_size))
            positions = np.arange(row.start, row.start + last - at)
            table = np.asarray(row.table, np.int64)
            slots = table[positions // block_size] * block_size + positions % block_size
            parts.append((np.asarray(row.tokens, np.int64), positions, slots))
            at = last
        wanted.append(np.arange(last - row.sample, last))
    packed = [torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True)]
    sample = torch.from_numpy(np.concatenate(wanted))
    return Batch(packed[0], packed[1], packed[2], sample, count, groups, tuple(chunks))


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


def _groups(table: NDArray[Any], contexts: Ints, block_size: int) -> tuple[DecodeGroup, ...]:
    """Split decode rows so that one long context does not pad all the short ones."""
    count, longest = len(contexts), int(contexts.max())
    padded = count * longest
    if (padded <= GROUP_TOKENS and padded - int(contexts.sum()) <= SPLIT_COST) or count == 1:
        return (_group(None, table, contexts, block_size),)
    order = np.argsort(-contexts, kind="stable")
    bounds, widest = [0], longest
    for at, context in enumerate(contexts[order].tolist()):
        full = at > bounds[-1] and (at + 1 - bounds[-1]) * widest > GROUP_TOKENS
        if full or (2 * context < widest and (widest - context) * (count - at) > SPLIT_COST):
            bounds.append(at)
            widest = context
    return tuple(
        _group(order[a:b], table, contexts, block_size)
        for a, b in zip(bounds, [*bounds[1:], count], strict=True)
    )


def _group(rows: Ints | None, table: NDArray[Any], contexts: Ints, block_size: int) -> DecodeGroup:
    if rows is not None:
        table, contexts = table[rows], contexts[rows]
    longest = int(contexts.max())
    span = -(-longest // block_size)
    index = None if rows is None else torch.from_numpy(rows)
    table = table[:, :span]
    if len(contexts) == 1:
        return DecodeGroup(index, _blocks(table[0]), longest, None)
    # Padding reads the row's own first block: entries past its last one may be anything.
    used = np.arange(span) * block_size < contexts[:, None]
    ids = torch.from_numpy(np.where(used, table, table[:, :1]).reshape(-1))
    mask = None
    if int(contexts.min()) < longest:
        beyond = torch.arange(longest) >= torch.from_numpy(contexts)[:, None]
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)[:, None, None]
    return DecodeGroup(index, ids, longest, mask)


def _chunk(row: Row, first: int, last: int, block_size: int) -> Chunk:
    context = row.start + last - first
    if row.start == 0:
        return Chunk(first, last, None, context, None)
    used = np.asarray(row.table[: -(-context // block_size)])
    mask = None
    if last - first > 1:
        beyond = torch.arange(context) > torch.arange(row.start, context)[:, None]
        mask = torch.zeros(beyond.shape).masked_fill_(beyond, -torch.inf)
    return Chunk(first, last, _blocks(used), context, mask)


def _blocks(ids: NDArray[Any]) -> Tensor | slice:
    """Block ids as an index, or as a slice if they are consecutive and need no gathering."""
    if len(ids) == 1 or (ids[1:] - ids[:-1] == 1).all():
        return slice(int(ids[0]), int(ids[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(ids))
