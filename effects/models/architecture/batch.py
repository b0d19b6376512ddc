"""One step's work as tensors, the same on every device: tokens, their KV slots and their
rows.

Tokens are packed: first rows of one token each (in the executor, decode rows), then
chunks, of several inputs of a row. Everything is read through block tables.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.effects.models.architecture.layer_states import BEHIND_LAST as BEHIND_LAST
from minfer.effects.models.architecture.layer_states import LayerStates as LayerStates
from minfer.effects.models.architecture.pending_states import PendingStates
from minfer.kernels.dequantized_work import DequantizedWork
from minfer.kernels.expanded_work import ExpandedWork
from minfer.kernels.flash import FlashWork
from minfer.kernels.state_work import DraftSpacing, StateChunks, StateWork

Ints = NDArray[np.int64]


@frozen(eq=False)
class PrefillChunks:
    """Rows of several inputs; all int32 [chunks]. A count of 0 means padding."""

    rows: Tensor  # of the table
    starts: Tensor  # the position of the first input
    counts: Tensor  # inputs
    offsets: Tensor  # of the first input among the packed tokens
    longest: int  # the largest possible count
    # For each group of layers, the work of flash-attn where it serves them; without: none
    flash: tuple[FlashWork | None, ...] = ()

    # Where latents are expanded to keys and values; None: queries are absorbed
    expanded: ExpandedWork | None = None
    # Where contexts in 8 bits are dequantized; None: attention reads the cache
    dequantized: DequantizedWork | None = None

    def flash_of(self, group: int) -> FlashWork | None:
        """Returns flash-attn's work in the layers of a group, if it serves them."""
        return self.flash[group] if self.flash else None


@frozen(eq=False)
class TappedTokens:
    """Tokens whose hidden states are requested, after the final norm."""

    tokens: Tensor  # [tapped] int32: indices
    states: Tensor  # [tapped, hidden]: where the model puts them


@frozen(eq=False)
class ChunkedLogits:
    """Tokens whose logits are computed `chunk_size` at a time: memory may not hold all.

    `take` gets the number of the first of them, and their logits [chunk_size, vocab].
    """

    tokens: Tensor  # [scored] int32: indices
    chunk_size: int
    take: Callable[[int, Tensor], None]

    def spans(self) -> Iterator[slice]:
        """Yields the slices of tokens that are computed together."""
        for begin in range(0, len(self.tokens), self.chunk_size):
            yield slice(begin, begin + self.chunk_size)


@frozen(eq=False)
class VerifiedRows:
    """The first rows of a step, which have drafts: the first tokens are the rows' last
    ones, and after those of all rows come drafts, a line of these rows for each place.
    Integers are int32.
    """

    decode_rows: int  # with and without drafts
    starts: Tensor  # [verified]: positions of their last tokens
    counts: Tensor  # [verified]: inputs of each, from 1 on; the others are padding
    firsts: Tensor  # [verified]: 0, 1, 2 ...
    max_count: int  # the largest possible count


@frozen(eq=False)
class Batch:
    """A packed step, ready for `forward`. Integers are int32 unless said otherwise."""

    tokens: Tensor  # [tokens] ids
    positions: Tensor  # [tokens] positions in their sequences
    # [tables, tokens] int64: page * block_size + offset, where each token's KV is written
    slots: Tensor
    # [sampled] indices of tokens whose logits are needed; None: every token
    sample: Tensor | None
    # [tables, rows, blocks]: page ids; entries that a row does not read may be anything.
    # There is a table for each page of a block, over all groups of layers
    table: Tensor
    rows: Tensor  # [decode] rows of the table that the first tokens belong to
    contexts: Tensor  # [decode] tokens that each of them attends to
    chunks: PrefillChunks | None  # the other tokens
    # Splits of the contexts of decode rows on a GPU, for each group of layers
    splits: tuple[int, ...] = ()
    fused: bool = False  # as in `kernels.fused_linear.norm_gated`
    tap: TappedTokens | None = None
    scored: ChunkedLogits | None = None
    # [tokens] bool: False for tokens that only pad the step; None: there are none
    real: Tensor | None = None
    # The rows with drafts: a cache may read a row's context once for all of its inputs,
    # or treat each input as a row of its own.
    verified: VerifiedRows | None = None
    # The rows whose states recurrent layers update; None: there are no such layers
    states: StateWork | None = None
    pending: PendingStates | None = None  # of rows with drafts, if there are any
    layer_states: LayerStates | None = None  # that a draft head reads
    # [tokens] slots of adapters, -1 for none; None: no row has an adapter
    adapter_slots: Tensor | None = None

    def splits_of(self, group: int) -> int:
        """Returns the splits of contexts in the layers of a group."""
        return self.splits[group] if self.splits else 1


@frozen(eq=False)
class BatchRow:
    """Inputs of one sequence: `tokens` at positions start, start + 1, ..."""

    tokens: Sequence[int] | Ints
    start: int
    # The sequence's block ids in order, at least up to the last input.
    table: Sequence[int] | Ints
    # The number of last tokens whose logits are needed: 0 inside a prompt, >1 for drafts.
    sample: int = 1
    # The page ids of the sequence's state, of a model with recurrent layers.
    state: Sequence[int] = ()
    adapter_slot: int = -1  # of the sequence's adapter; -1: it has none


@frozen(eq=False)
class _Packing:
    """The places of rows' tokens among the packed ones: rows of one token first."""

    counts: Ints  # [rows] tokens of each
    offsets: Ints  # [rows] of the first of them
    order: Ints  # [rows] in which they are packed

    @classmethod
    def of(cls, rows: Sequence[BatchRow]) -> "_Packing":
        counts = np.array([len(row.tokens) for row in rows])
        order = np.argsort(counts > 1, kind="stable")
        offsets = np.empty_like(counts)
        offsets[order] = np.cumsum(counts[order]) - counts[order]
        return cls(counts, offsets, order)

    @property
    def owners(self) -> Ints:
        """[tokens] the row of each token."""
        return np.repeat(self.order, self.counts[self.order])

    def sampled(self, rows: Sequence[BatchRow]) -> Ints:
        """Returns [sampled] the tokens whose logits are needed, in the order of rows."""
        ends = self.offsets + self.counts
        indices = (
            np.arange(end - row.sample, end) for end, row in zip(ends, rows, strict=True)
        )
        return np.concatenate(list(indices))


def make_batch(
    rows: Sequence[BatchRow], block_size: int, device: torch.device | str = "cpu"
) -> Batch:
    """Pack rows into one step, for layers of one group; logits are in the order of the
    rows.

    Raises ValueError if there are none, one is empty or its table is too short.
    """
    _check_all(rows, block_size)

    def to_device(values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    packing, starts = _Packing.of(rows), np.array([row.start for row in rows])
    table, owners, order = _table(rows), packing.owners, packing.order
    positions = np.arange(len(owners)) - packing.offsets[owners] + starts[owners]
    blocks = table[owners, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    decode_rows = order[packing.counts[order] == 1]
    chunk_rows = order[len(decode_rows) :]
    chunks = None
    if len(chunk_rows):
        chunks = PrefillChunks(
            rows=to_device(chunk_rows),
            starts=to_device(starts[chunk_rows]),
            counts=to_device(packing.counts[chunk_rows]),
            offsets=to_device(packing.offsets[chunk_rows]),
            longest=int(packing.counts.max()),
        )
    states = None
    if rows[0].state:
        states = StateWork(
            table=to_device(np.array([row.state for row in rows])),
            rows=to_device(decode_rows),
            starts=to_device(starts[decode_rows]),
            chunks=None if chunks is None else state_chunks(chunks),
        )
    adapter_slots = np.array([row.adapter_slot for row in rows])[owners]
    return Batch(
        tokens=to_device(np.concatenate([np.asarray(rows[i].tokens) for i in order])),
        positions=to_device(positions),
        slots=torch.from_numpy(slots)[None].to(device),
        sample=to_device(packing.sampled(rows)),
        table=to_device(table)[None],
        rows=to_device(decode_rows),
        contexts=to_device(starts[decode_rows] + 1),
        chunks=chunks,
        states=states,
        adapter_slots=to_device(adapter_slots) if adapter_slots.max() >= 0 else None,
    )


def state_chunks(chunks: PrefillChunks) -> StateChunks:
    """Returns chunks in the form that recurrent layers take."""
    return StateChunks(
        rows=chunks.rows,
        starts=chunks.starts,
        counts=chunks.counts,
        offsets=chunks.offsets,
        longest=chunks.longest,
    )


def drafted_rows(verified: VerifiedRows, decode_rows: Tensor) -> StateChunks:
    """Returns the rows with drafts, which are the first of the table rows `decode_rows`,
    in the form that recurrent layers take.
    """
    count = len(verified.counts)
    return StateChunks(
        rows=decode_rows[:count],
        starts=verified.starts,
        counts=verified.counts,
        offsets=verified.firsts,
        longest=verified.max_count,
        spacing=DraftSpacing(lead=verified.decode_rows - count, stride=count),
    )


def _table(rows: Sequence[BatchRow]) -> NDArray[np.int32]:
    """Returns the block tables, one below the other."""
    table = np.zeros((len(rows), max(len(row.table) for row in rows)), np.int32)
    for table_row, row in zip(table, rows, strict=True):
        table_row[: len(row.table)] = row.table
    return table


def _check_all(rows: Sequence[BatchRow], block_size: int) -> None:
    if not rows:
        raise ValueError("a batch needs at least one row")
    for row in rows:
        _check(row, block_size)


def _check(row: BatchRow, block_size: int) -> None:
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
