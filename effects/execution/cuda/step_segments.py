"""The segments of a step, each for one launch of an attention kernel, the same for all
kinds of attention.

The packed tokens are, in order: decode rows' last tokens, those of rows with drafts
first; drafts; prefill chunks.
"""

from collections.abc import Iterator

from attrs import frozen
from torch import Tensor

from minfer.effects.models.architecture.batch import Batch
from minfer.kernels.attention import DraftLayout


@frozen(eq=False)
class DecodeSegment:
    """Decode rows of one query each."""

    tokens: slice  # of the packed ones
    rows: Tensor
    contexts: Tensor
    splits: int


@frozen(eq=False)
class ChunkSegment:
    """Rows of several queries: prefill chunks, or last tokens with their drafts."""

    tokens: slice  # of the packed ones, from which offsets count
    rows: Tensor
    starts: Tensor
    counts: Tensor
    offsets: Tensor
    max_count: int
    splits: int = 1
    draft_layout: DraftLayout | None = None  # None: prefill chunks


def decode_segments(batch: Batch, splits: int) -> Iterator[DecodeSegment | ChunkSegment]:
    """Yields the segments of decode rows: those with drafts, and the others, if any."""
    decode_inputs = len(batch.rows)
    plain_rows = slice(0, decode_inputs)
    if (drafts := batch.verified) is not None:
        verified = len(drafts.starts)
        plain_rows = slice(verified, drafts.decode_rows)
        yield ChunkSegment(
            slice(0, decode_inputs),
            batch.rows[:verified],
            drafts.starts,
            drafts.counts,
            drafts.firsts,
            drafts.max_count,
            splits,
            DraftLayout(skip=drafts.decode_rows, stride=verified),
        )
    if plain_rows.start < plain_rows.stop:
        yield DecodeSegment(
            plain_rows, batch.rows[plain_rows], batch.contexts[plain_rows], splits
        )


def prefill_segments(batch: Batch) -> Iterator[ChunkSegment]:
    """Yields the prefill chunks, if any."""
    if (chunks := batch.chunks) is not None:
        dequantized = chunks.dequantized
        yield ChunkSegment(
            slice(0, len(batch.tokens)),
            chunks.rows if dequantized is None else dequantized.own_rows,
            chunks.starts,
            chunks.counts,
            chunks.offsets,
            chunks.longest,
        )
