"""What the recurrent layers of a step need to know of its rows.

Tokens are packed as for attention: first the rows of one input each, then chunks of
several inputs of a row.
"""

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class StateChunks:
    """Rows of several inputs; all int32 [chunks]. A count of 0 means padding: nothing of
    such a row is read or written.
    """

    rows: Tensor  # of the table
    starts: Tensor  # the position of the first input; 0: the state is zero
    counts: Tensor  # inputs
    offsets: Tensor  # of the first input among the packed tokens
    longest: int  # the largest possible count


@frozen(eq=False)
class StateWork:
    """The rows of a step, whose states are read, updated by the step's inputs and written
    back. A row has one line here, and no two rows share a page.
    """

    table: Tensor  # [table rows, pages of a state] int32: page ids
    rows: Tensor  # [decode] int32: rows of the table that the first tokens belong to
    starts: Tensor  # [decode] int32: their positions; 0: the state is zero
    chunks: StateChunks | None  # the other tokens

    def spans(self) -> Iterator["RowSpans"]:
        """Yields the decode rows, then each chunk that is not padding. Synchronises:
        for references only.
        """
        count = len(self.rows)
        if count:
            tokens = torch.arange(count, device=self.rows.device)[:, None]
            yield RowSpans(rows=self.rows, is_new=self.starts == 0, tokens=tokens)
        if self.chunks is None:
            return
        columns = self.chunks.rows, self.chunks.starts
        for i, (count, offset) in enumerate(
            zip(self.chunks.counts.tolist(), self.chunks.offsets.tolist(), strict=True)
        ):
            if count:
                rows, starts = (column[i : i + 1] for column in columns)
                tokens = torch.arange(offset, offset + count, device=rows.device)[None]
                yield RowSpans(rows=rows, is_new=starts == 0, tokens=tokens)


@frozen(eq=False)
class RowSpans:
    """Rows with the same number of inputs."""

    rows: Tensor  # [n] of the table
    is_new: Tensor  # [n] bool: whether a row's first input is at position 0
    tokens: Tensor  # [n, count]: the places of its inputs among the packed tokens
