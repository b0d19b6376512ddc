"""Step shapes: what distinguishes an executor's steps, and the few sizes to which CUDA
graphs pad them.

A step has decode rows, whose input is their last token; the first of them may have drafts
to verify as further inputs (verified.py). Prefill chunks follow. All numbers of a shape
determine which launches there are and with what sizes, so steps of a shape can share a
graph. There must be few shapes: a graph takes time to capture and memory, and pays only
if it is replayed.
"""

from typing import Final

from attrs import evolve, frozen

from minfer.effects.execution.device.device_rows import SamplingNeeds, aligned
from minfer.effects.models.layout.shapes import (
    max_step_drafts,
    next_power_of_two,
    padded_drafts,
    padded_tokens,
)
from minfer.records.config import EngineConfig
from minfer.values.texts import counted

CHUNK_SIZES = (1, 8, 32)  # prefill chunks of a captured step
# Decode rows up to which a lone chunk has graphs of its own: beside more, seven padding
# chunks cost nothing that can be measured.
MAX_LONE_CHUNK_ROWS = 8
# `divisions` of `bucket_of`, for steps without and with prefill tokens
DECODE_DIVISIONS = 16
MIXED_DIVISIONS = 4
# Decode rows beside prefill tokens, up to which only powers of two have graphs: the
# padding costs such a step little, and two other sizes already multiply the number of
# graphs.
MAX_DOUBLING_ROWS = 64
# Beside prefill tokens, decode rows are padded to a multiple of a power of two: the
# largest of at most one row for this number of tokens. The padding takes little of such a
# step's time; more sizes, each with graphs of its own, would not pay.
TOKENS_PER_PADDING_ROW = 16
# Drafts of a step up to which all rows are padded to have drafts: such a small forward
# takes as long for its weights alone (a 7B: 6.3 ms with 64 inputs, 6.5 with 128, on an
# H100), and graphs are captured in advance for steps whose rows all have drafts. With
# more drafts, all rows are padded so if their number is less than twice the padded number
# of rows with drafts.
MAX_FULLY_PADDED_DRAFTS: Final = 128
# tokens of a chunk: shapes differ above it, as programs are launched for the longest
MIN_LONGEST_TOKENS = 1024


@frozen(kw_only=True)
class StepShape:
    """What determines the launches of a step; numbers include padding."""

    decode_rows: int  # rows whose input is their last token
    draws: int  # rows of logits: of decode rows, and of the last chunk of each prefill
    filtered: bool = False  # a row has a top-k, top-p, min-p or typical-p
    scored: bool = False  # a row requests log-probabilities
    shaped: bool = False  # a row's logits are changed before sampling
    tokens: int = 0  # prefill tokens
    chunks: int = 0  # prefill chunks
    longest: int = 0  # tokens of the longest chunk
    inside: int = 0  # chunks inside which a state is kept; 0 in all shapes with a graph
    # Splits of the contexts of decode rows, for each group of layers; without: none
    splits: tuple[int, ...] = ()
    # Tokens before the chunks in all, at most, where their latents are expanded, or their
    # contexts dequantized, which no graph contains; None: they are not.
    history: int | None = None
    # Rows may have deferred sampling: their logits are kept until then.
    keeps_logits: bool = False
    deferred_draws: bool = False  # deferred draws from kept logits: there are no inputs
    # The first decode rows, which have lines for drafts, though not all of them may have
    # drafts.
    verified: int = 0
    drafts: int = 0  # of each of these, at most
    proposes: bool = False  # the drafter makes some of them
    draft_splits: tuple[int, ...] = ()  # `splits` of the drafter
    adapters: bool = False  # a row may have an adapter

    @property
    def decode_inputs(self) -> int:
        """Inputs of decode rows, drafts included."""
        return self.decode_rows + self.verified * self.drafts

    @property
    def inputs(self) -> int:
        """All inputs."""
        return self.decode_inputs + self.tokens

    @property
    def lines(self) -> int:
        """Lines of the sampler's output: one for each of `draws`, then those of
        `verified.DraftOutputs`.
        """
        return self.draft_line(self.drafts + 1) if self.drafts else self.draws

    def draft_line(self, place: int) -> int:
        """Returns the first of the lines of a draft's place."""
        return aligned(self.draws) + place * aligned(self.verified)

    @property
    def sampling_needs(self) -> SamplingNeeds:
        """What sampling has to do for at least one row."""
        return SamplingNeeds(self.filtered, self.scored, self.shaped)

    def described(self) -> str:
        """Returns what distinguishes steps of this shape, in words."""
        if self.deferred_draws:
            return counted(self.draws, "deferred draw")
        numbers = {
            "decode row": self.decode_rows,
            "prefill token": self.tokens,
            "chunk": self.chunks,
            "draw": self.draws,
        }
        words = [counted(count, noun) for noun, count in numbers.items() if count]
        words += [f"{counted(self.drafts, 'draft')} a row"] if self.drafts else []
        words += [
            name for name in ("filtered", "scored", "shaped") if getattr(self, name)
        ]
        words += ["with adapters"] if self.adapters else []
        words += [f"splits {self.splits}"] if self.splits else []
        return ", ".join(words)

    def fits(self, max_tokens: int) -> bool:
        """Returns whether the shape can have a graph, of up to `max_tokens` prefill
        tokens.
        """
        if self.inside:
            return False
        return padded_tokens(self.tokens) <= max_tokens and self.chunks <= CHUNK_SIZES[-1]

    def padded(self, max_rows: int) -> "StepShape":
        """Returns the shape whose graph can serve this one, in an engine of at most
        `max_rows` rows.
        """
        if self.deferred_draws:
            return evolve(self, draws=bucket_of(self.draws, DECODE_DIVISIONS))
        if not self.tokens:
            decode_rows = bucket_of(self.decode_rows, DECODE_DIVISIONS)
            shape = evolve(self, decode_rows=decode_rows, draws=decode_rows)
            return shape._with_padded_drafts()
        tokens = padded_tokens(self.tokens)
        decode_rows = mixed_bucket_of(self.decode_rows, tokens, max_rows)
        sizes = CHUNK_SIZES if decode_rows <= MAX_LONE_CHUNK_ROWS else CHUNK_SIZES[1:]
        chunks = next(size for size in sizes if size >= self.chunks)
        longest = min(
            tokens, max(MIN_LONGEST_TOKENS, 1 << (self.longest - 1).bit_length())
        )
        shape = evolve(
            self,
            decode_rows=decode_rows,
            draws=decode_rows + chunks,
            tokens=tokens,
            chunks=chunks,
            longest=longest,
        )
        return shape._with_padded_drafts()

    def _with_padded_drafts(self) -> "StepShape":
        if not self.drafts:
            return self
        decode_rows = self.decode_rows
        verified = min(decode_rows, next_power_of_two(self.verified))
        drafts = padded_drafts(self.drafts)
        pads_all_rows = (
            decode_rows * drafts <= MAX_FULLY_PADDED_DRAFTS or 2 * verified > decode_rows
        )
        if pads_all_rows and not self.tokens:
            verified = decode_rows
        return evolve(self, verified=verified, drafts=drafts)


def bucket_of(count: int, divisions: int) -> int:
    """Returns the rows of the graph that serves `count` rows: at most 2 / `divisions`
    more, or 7.
    """
    for size in (1, 2, 4, 8):
        if count <= size:
            return size
    step = max(8, (1 << (count - 1).bit_length()) // divisions)
    return -(-count // step) * step


def mixed_bucket_of(count: int, tokens: int, max_rows: int) -> int:
    """Returns the rows of the graph that serves `count` of at most `max_rows` decode rows
    beside this many prefill tokens; there may be no rows.
    """
    if not count:
        return 0
    step = 1 << max(0, (tokens // TOKENS_PER_PADDING_ROW).bit_length() - 1)
    rows = -(-_mixed_size(count) // step) * step
    return min(rows, _mixed_size(max_rows))


def _mixed_size(count: int) -> int:
    """Returns the rows of the graph that serves `count` decode rows beside few prefill
    tokens.
    """
    if count <= MAX_DOUBLING_ROWS:
        return next_power_of_two(count)
    return bucket_of(count, MIXED_DIVISIONS)


def max_lines(config: EngineConfig) -> int:
    """Returns `StepShape.lines` of the largest step of an engine."""
    draws, drafts = max_draws(config.max_num_seqs), max_step_drafts(config)
    # A line of rows is aligned, and one more line has the counts.
    return draws + 4 * (drafts + 2) if drafts else draws


def max_draws(seqs: int) -> int:
    """Returns the rows of logits of the largest step of an engine of `seqs` sequences,
    without drafts.
    """
    return _mixed_size(seqs) + max(seqs, CHUNK_SIZES[-1])
