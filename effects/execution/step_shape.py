"""What distinguishes the steps of an executor, and the few sizes to which CUDA graphs pad
them.

A step has rows that feed themselves with the token drawn last, of which the first may
have drafts to verify as further inputs (verified.py), then chunks of history. All numbers
of a kind decide which launches there are and with what sizes, so steps of a
kind can share a graph. There have to be few kinds: a graph takes time to capture and
memory, and is worth it if it returns.
"""

from typing import Final

from attrs import evolve, frozen

from minfer.config import EngineConfig
from minfer.effects.execution.device_rows import Wants, aligned
from minfer.effects.models.shapes import (
    drafts_from,
    most_drafts,
    padded_tokens,
    power_from,
)

CHUNK_SIZES = (1, 8, 32)  # chunks of a captured step
# Rows that feed themselves, up to which a lone chunk has graphs of its own: beside more,
# seven chunks that are none cost nothing that can be measured.
LONELY = 8
# `bucket_of`'s parts: of steps without and with inputs from history
DECODE = 16
MIXED = 8
# Rows beside inputs from history, up to which only powers of two have graphs: so few pad
# such a step by little, and there are two other sizes whose graphs differ.
DOUBLING = 64
# Drafts of a step up to which all rows are taken to have some: a forward so small takes
# as long for its weights alone (a 7B: 6.3 ms with 64 inputs, 6.5 with 128, on an H100),
# and graphs are foreseen for steps whose rows all have drafts. With more, they are taken
# to if that is less than twice the number to which those that do are padded.
FEW_DRAFTS: Final = 128
# inputs of a chunk: kinds differ above it, as programs are launched for the longest
LONGEST = 1024


@frozen(kw_only=True)
class StepShape:
    """What distinguishes the launches of a step; numbers include padding."""

    decode_rows: int  # rows that feed themselves
    draws: int  # rows of logits: theirs, and of chunks that end their history
    filtered: bool = False  # somebody has a top-k, top-p, min-p or typical-p
    scored: bool = False  # somebody asked for log-probabilities
    shaped: bool = False  # somebody's logits are changed before they are drawn from
    tokens: int = 0  # inputs from history
    chunks: int = 0  # rows that they belong to
    longest: int = 0  # inputs of a chunk, at most
    splits: int = 1  # ranges that contexts of rows that feed themselves are cut into
    # Somebody may be sampled apart: logits of who is are kept until then.
    apart: bool = False
    late: bool = False  # these are drawn now, from what was kept: there are no inputs
    # Of the rows that feed themselves the first, which have lines for drafts, if not all
    # of them drafts.
    verified: int = 0
    drafts: int = 0  # of each of these, at most
    proposes: bool = False  # the draft model says some of them
    draft_splits: int = 1  # `splits`, of the draft model

    @property
    def decode_inputs(self) -> int:
        """Inputs of rows that feed themselves, drafts included."""
        return self.decode_rows + self.verified * self.drafts

    @property
    def lines(self) -> int:
        """Of what is drawn: one for each of `draws`, then as `verified.Further` says."""
        if not self.drafts:
            return self.draws
        return aligned(self.draws) + (self.drafts + 1) * aligned(self.verified)

    @property
    def wants(self) -> Wants:
        """What somebody of it wants of sampling."""
        return Wants(self.filtered, self.scored, self.shaped)

    def fits(self, most: int) -> bool:
        """Whether there can be a graph of it, of up to `most` tokens from history."""
        return padded_tokens(self.tokens) <= most and self.chunks <= CHUNK_SIZES[-1]

    def padded(self) -> "StepShape":
        """The kind whose graph can serve this one."""
        if self.late:
            return evolve(self, draws=bucket_of(self.draws, DECODE))
        if not self.tokens:
            decode_rows = bucket_of(self.decode_rows, DECODE)
            few = evolve(self, decode_rows=decode_rows, draws=decode_rows)
            return few._with_padded_drafts()
        tokens = padded_tokens(self.tokens)
        decode_rows = mixed_bucket_of(self.decode_rows)
        sizes = CHUNK_SIZES if decode_rows <= LONELY else CHUNK_SIZES[1:]
        chunks = next(size for size in sizes if size >= self.chunks)
        longest = min(tokens, max(LONGEST, 1 << (self.longest - 1).bit_length()))
        several = evolve(
            self,
            decode_rows=decode_rows,
            draws=decode_rows + chunks,
            tokens=tokens,
            chunks=chunks,
            longest=longest,
        )
        return several._with_padded_drafts()

    def _with_padded_drafts(self) -> "StepShape":
        if not self.drafts:
            return self
        most = self.decode_rows
        verified = min(most, power_from(self.verified))
        drafts = drafts_from(self.drafts)
        few = most * drafts <= FEW_DRAFTS or 2 * verified > most
        if few and not self.tokens:
            verified = most
        return evolve(self, verified=verified, drafts=drafts)


def bucket_of(count: int, parts: int) -> int:
    """How many rows the graph has that serves so many: at most 2 / `parts` more, or 7."""
    for size in (1, 2, 4, 8):
        if count <= size:
            return size
    step = max(8, (1 << (count - 1).bit_length()) // parts)
    return -(-count // step) * step


def mixed_bucket_of(count: int) -> int:
    """The same beside inputs from history, where there may be none."""
    if count <= DOUBLING:
        return power_from(count) if count else 0
    return bucket_of(count, MIXED)


def most_lines(config: EngineConfig) -> int:
    """`StepShape.lines` of the largest step of an engine."""
    draws, drafts = most_draws(config.max_num_seqs), most_drafts(config)
    # A line of rows is aligned, and there is one of numbers.
    return draws + 4 * (drafts + 2) if drafts else draws


def most_draws(seqs: int) -> int:
    """Rows of logits of the largest step of an engine of so many sequences, but for
    drafts.
    """
    return mixed_bucket_of(seqs) + max(seqs, CHUNK_SIZES[-1])
