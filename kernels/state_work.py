"""What the recurrent layers of a step need to know of its rows.

Tokens are packed as for attention: first the rows of one input each, then chunks of
several inputs of a row.

Theory of drafts. A state that took in a rejected draft cannot be undone. So a step reads
the states of rows with drafts and does not write them. Once it is known which drafts are
accepted, in the same step, the states are updated by the accepted inputs alone: the
kernels run again, over the layer's own inputs, which were kept (`accepted_work`). No
product of matrices is computed twice, and between steps a state has taken in exactly the
inputs that its row keeps. Such a step reads the states of these rows twice and writes
them once.

Two other ways were considered. With one state for each draft, a state is read once and
written once for each input: with 3 drafts, 5 times the bytes of a state instead of 3, and
4 states a row in memory. If the next step took in the accepted inputs, a third of the
bytes would be saved (36 us a row of Qwen3-Next instead of 54, at 4.2 TB/s), but whatever
reads, copies or saves a state would have to take in these inputs first.

A state inside a chunk is kept by dividing the chunk in two: the first part, in `heads`,
is taken in before all other chunks, and then the state is copied. That costs one more
launch of each kernel. The second part's blocks of tokens may begin elsewhere than without
the division, so sums may be rounded differently.
"""

from collections.abc import Iterator

import torch
from attrs import evolve, frozen
from torch import Tensor


@frozen
class DraftSpacing:
    """Where the inputs of a row with drafts are among the packed tokens: the first at the
    row's offset, and its draft i (from 1) at offset + lead + i * stride. Drafts come
    after all decode rows: first the first draft of each row, then the second of each.
    """

    lead: int
    stride: int


@frozen(eq=False)
class StateChunks:
    """Rows of several inputs; all tensors are int32 [chunks]. A count of 0 means padding:
    nothing of such a row is read or written.
    """

    rows: Tensor  # of the table
    starts: Tensor  # the position of the first input; 0: the state is zero
    counts: Tensor  # inputs
    offsets: Tensor  # of the first input among the packed tokens
    longest: int  # the largest possible count
    spacing: DraftSpacing | None = None  # None: inputs follow one another
    # Rows of the table to which the states are copied after these inputs; None: they are
    # not.
    saved: Tensor | None = None

    def places(self, offset: int, count: int) -> Tensor:
        """Returns the places of a chunk's inputs among the packed tokens, [count]."""
        numbers = torch.arange(count, device=self.rows.device)
        if self.spacing is None:
            return offset + numbers
        behind = (numbers > 0) * self.spacing.lead
        return offset + behind + numbers * self.spacing.stride


@frozen(eq=False)
class StateWork:
    """The rows of a step, whose states are read, updated by the step's inputs and written
    back. Each row is here once, but for those in `heads`, and no two rows share a page,
    but for padding.
    """

    table: Tensor  # [table rows, pages of a state] int32: page ids
    rows: Tensor  # [decode] int32: rows of the table that the first tokens belong to
    starts: Tensor  # [decode] int32: their positions; 0: the state is zero
    chunks: StateChunks | None  # the other tokens
    # Rows with drafts, whose states are read and not written
    drafted: StateChunks | None = None
    first_token: int = 0  # the packed token of the first decode row
    # The first parts of divided chunks, whose second parts are in `chunks`; the states
    # between them are kept
    heads: StateChunks | None = None

    @property
    def all_chunks(self) -> Iterator[tuple[StateChunks, bool]]:
        """Rows of several inputs, and whether their states are written."""
        if self.drafted is not None:
            yield self.drafted, False
        if self.heads is not None:
            yield self.heads, True
        if self.chunks is not None:
            yield self.chunks, True

    def keeping_inside(
        self, numbers: Tensor, counts: Tensor, saved_offset: int
    ) -> "StateWork":
        """Returns the work that also keeps the states of chunks `numbers` [n] int32 after
        their first `counts` [n] inputs: in the table at the chunk's row + `saved_offset`.
        Raises ValueError if there are no chunks.
        """
        if (chunks := self.chunks) is None:
            raise ValueError("no row of this step has several inputs")
        rows, starts, offsets = (
            column.index_select(0, numbers)
            for column in (chunks.rows, chunks.starts, chunks.offsets)
        )
        heads = evolve(
            chunks,
            rows=rows,
            starts=starts,
            counts=counts,
            offsets=offsets,
            saved=rows + saved_offset,
        )
        before = torch.zeros_like(chunks.counts).index_copy(0, numbers.long(), counts)
        others = evolve(
            chunks,
            starts=chunks.starts + before,
            counts=chunks.counts - before,
            offsets=chunks.offsets + before,
        )
        return evolve(self, heads=heads, chunks=others)

    def accepted_work(self, counts: Tensor) -> "StateWork":
        """Returns the work that updates the states of rows with drafts by their first
        `counts` inputs [drafted] int32. Raises ValueError if no row has drafts.
        """
        if self.drafted is None:
            raise ValueError("no row of this step has drafts")
        chunks = evolve(self.drafted, counts=counts)
        return StateWork(self.table, self.rows[:0], self.starts[:0], chunks)

    def spans(self) -> Iterator["RowSpans"]:
        """Yields the decode rows, then each chunk that is not padding. Synchronises:
        for references only.
        """
        if count := len(self.rows):
            tokens = torch.arange(count, device=self.rows.device) + self.first_token
            is_new = self.starts == 0
            yield RowSpans(rows=self.rows, is_new=is_new, tokens=tokens[:, None])
        for chunks, writes in self.all_chunks:
            yield from _chunk_spans(chunks, writes=writes)


@frozen(eq=False)
class RowSpans:
    """Rows with the same number of inputs."""

    rows: Tensor  # [n] of the table
    is_new: Tensor  # [n] bool: whether a row's first input is at position 0
    tokens: Tensor  # [n, count]: the places of its inputs among the packed tokens
    writes: bool = True  # the states
    saved: Tensor | None = None  # [n] rows to which states are written, too


def _chunk_spans(chunks: StateChunks, *, writes: bool) -> Iterator[RowSpans]:
    """Yields each chunk that is not padding. Synchronises."""
    lines = zip(chunks.counts.tolist(), chunks.offsets.tolist(), strict=True)
    for i, (count, offset) in enumerate(lines):
        if count:
            yield RowSpans(
                rows=chunks.rows[i : i + 1],
                is_new=chunks.starts[i : i + 1] == 0,
                tokens=chunks.places(offset, count)[None],
                writes=writes,
                saved=None if chunks.saved is None else chunks.saved[i : i + 1],
            )
