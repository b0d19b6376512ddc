"""One step's work as tensors, the same on every device: tokens, where their KV goes, who
they are.

Tokens are packed: first rows of one token each (in the executor, those that feed
themselves), then chunks, of several inputs of a row. Everything is read through block
tables.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.kernels.flash import FlashWork

Ints = NDArray[np.int64]


@frozen(eq=False)
class Chunks:
    """Rows of several inputs; all int32 [chunks]. A count of 0 pads."""

    rows: Tensor  # of the table
    starts: Tensor  # the position of the first input
    counts: Tensor  # inputs
    offsets: Tensor  # of the first input among the packed tokens
    longest: int  # count there can be
    flash: FlashWork | None = None  # where flash-attn serves them


@frozen(eq=False)
class Batch:
    """A packed step, ready for `forward`. Integers are int32 unless said otherwise."""

    tokens: Tensor  # [tokens] ids
    positions: Tensor  # [tokens] places in their sequences
    # [tokens] int64: block * block_size + offset, where each token's KV is written
    slots: Tensor
    sample: (
        Tensor | None
    )  # [sampled] indices of tokens whose logits are wanted; None: every token
    # [rows, blocks]: block ids; those that a row does not read may be anything
    table: Tensor
    rows: Tensor  # [decode] rows of the table that the first tokens belong to
    contexts: Tensor  # [decode] tokens that each of them attends to
    chunks: Chunks | None  # what the other tokens are
    splits: int = 1  # ranges that a GPU cuts contexts of decode rows into
    fused: bool = False  # as in `kernels.linear.norm_gated`


@frozen(eq=False)
class Row:
    """Inputs of one sequence: `tokens` at positions start, start + 1, ..."""

    tokens: Sequence[int] | Ints
    start: int
    table: (
        Sequence[int] | Ints
    )  # the sequence's block ids in order, at least up to the last input
    sample: int = (
        1  # of how many last tokens logits are wanted: 0 inside a prompt, >1 for drafts
    )


def make_batch(
    rows: Sequence[Row], block_size: int, device: torch.device | str = "cpu"
) -> Batch:
    """Pack rows into one step; logits come out in their order.

    Raises ValueError if there is nothing to run, a row is empty or its table is too
    short.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    for row in rows:
        _check(row, block_size)
    counts = np.array([len(row.tokens) for row in rows])
    starts = np.array([row.start for row in rows])
    table = np.zeros((len(rows), max(len(row.table) for row in rows)), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row.table)] = row.table
    order = np.argsort(counts > 1, kind="stable")  # rows of one token first
    offsets = np.empty_like(counts)
    offsets[order] = np.cumsum(counts[order]) - counts[order]
    owners = np.repeat(order, counts[order])
    positions = np.arange(counts.sum()) - offsets[owners] + starts[owners]
    blocks = table[owners, positions // block_size].astype(np.int64)
    last = offsets + counts
    wanted = [np.arange(last[i] - row.sample, last[i]) for i, row in enumerate(rows)]

    def sent(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    alone = order[: int((counts == 1).sum())]
    several = order[len(alone) :]
    chunks = None
    if len(several):
        chunks = Chunks(
            sent(several),
            sent(starts[several]),
            sent(counts[several]),
            sent(offsets[several]),
            int(counts.max()),
        )
    slots = torch.from_numpy(blocks * block_size + positions % block_size).to(device)
    tokens = np.concatenate([np.asarray(rows[i].tokens) for i in order])
    return Batch(
        sent(tokens),
        sent(positions),
        slots,
        sent(np.concatenate(wanted)),
        sent(table),
        sent(alone),
        sent(starts[alone] + 1),
        chunks,
    )


def _check(row: Row, block_size: int) -> None:
    count = len(row.tokens)
    if not 0 <= row.sample <= count or count == 0 or row.start < 0:
        needs = "a row needs tokens, a start of 0 or more and a sample between 0 and its"
        raise ValueError(
            f"{needs} {count} tokens; found start {row.start}, sample {row.sample}"
        )
    if len(row.table) * block_size < row.start + count:
        short = (
            f"a table of {len(row.table)} blocks of {block_size} is too short for "
            f"positions"
        )
        raise ValueError(f"{short} up to {row.start + count - 1}")
