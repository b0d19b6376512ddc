"""Which step shapes get CUDA graphs before the first request, and in which order.

Theory. There are more shapes than there is time for: two hundred captures take some 15 ms
each, and many shapes never occur. Shapes that every request needs come first: pure decode
steps of every size, with default sampling. With speculation, the same steps follow with
drafts on every row: with the most drafts first, and then with each smaller number, as the
best number differs from step to step, and launching kernel by kernel costs more than the
drafts gain. (Beside prompts, rows with drafts are a forward of their own: pack_plan.py.)
Then come prompts, alone and beside decode rows without drafts: first all with at most
`MAX_LONE_CHUNK_ROWS` decode rows, as a server's first load is mostly of few clients, and
such steps are so short that launching them kernel by kernel takes several times as long.
Where rows may have adapters, each shape is followed by the same one with adapters.
Where grammars can be requested, any of these steps may have rows with deferred sampling;
the deferred draws, which are a few launches, come after pure decode steps. Then come
rarely requested shapes: other ways of sampling, contexts with other splits, many short
prompts at once. Other steps of many prefill tokens come last.

There is no time for all prompt shapes beside more decode rows. The number of decode rows
and the length of prompts are not known before requests arrive; both vary by factors: a
server has 2 streams or 40, and a prompt leaves 20 tokens to compute or 600. So each
doubling is assumed to be equally likely, and the likelihood of a shape is the product of
the doublings of rows and of tokens that it serves. Beside many tokens, rows are padded to
few sizes (step_shape.py), so each of these serves many doublings. While more prompts wait
than a step takes, each step is full: so the largest steps serve more doublings of tokens.
If the order took one number of rows after the other, time would run out at 32, and a
burst of new requests beside 40 streams would be launched kernel by kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import log2
from typing import Final

from attrs import evolve, frozen

from minfer.effects.execution.device.device_rows import SamplingNeeds
from minfer.effects.execution.device.step_shape import (
    CHUNK_SIZES,
    DECODE_DIVISIONS,
    MAX_LONE_CHUNK_ROWS,
    MIN_LONGEST_TOKENS,
    StepShape,
    bucket_of,
    mixed_bucket_of,
)
from minfer.effects.models.layout.shapes import (
    max_step_drafts,
    padded_drafts,
    padded_tokens,
)
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE

# Prefill tokens of a step: with more, the GPU takes longer than the host.
MAX_USUAL_TOKENS: Final = 2048
# Prefill tokens of several prompts at once, in loads of few clients.
SEVERAL_PROMPT_TOKENS: Final = range(256, 4096 + 1)
# Where the first doublings begin, of prefill tokens and of decode rows.
MIN_TOKENS: Final = 32
MIN_ROWS: Final = 0.5
# What a shape without decode rows counts, in doublings of rows.
IDLE_DOUBLINGS: Final = 0.5
# Doublings of waiting prompt tokens beyond what a step takes: they fill the largest step.
FULL_DOUBLINGS: Final = 3.0
# The likelihood of several prompts beside few rows, compared with one prompt.
SEVERAL_LIKELIHOOD: Final = 0.25
# Tokens of a prompt, in large steps that many prompts fill.
USUAL_PROMPT_TOKENS: Final = range(128, 512 + 1)
# Returns a shape with the splits for contexts of up to a number of tokens.
AddSplits = Callable[[StepShape, int], StepShape]


def capture_order(
    config: EngineConfig,
    max_tokens: int,
    likely: SamplingNeeds,
    contexts: Sequence[int],
    add_splits: AddSplits,
    *,
    grammars: bool = False,
    fewer_drafts: bool = False,
) -> list[StepShape]:
    """Returns the shapes that can have graphs, each once, the most useful first.

    max_tokens: the most prefill tokens of a graph. likely: default sampling. contexts:
    lengths by which kernels are chosen, the shortest first. grammars: whether requests
    can have grammars. fewer_drafts: whether the number of drafts varies, which the engine
    learns later (`config` may not have it yet).
    """
    short, longer = contexts[:1], contexts[1:]
    refiltered = evolve(likely, filtered=not likely.filtered)
    scored = evolve(likely, scored=not likely.scored)
    shaped = evolve(likely, shaped=not likely.shaped)
    decode = _decode_shapes(config)
    seqs = config.max_num_seqs
    sizes = sorted({mixed_bucket_of(shape.decode_rows, 0, seqs) for shape in decode})
    prompts = _prefill_shapes([0], config, max_tokens)
    beside = _prefill_shapes(sizes, config, max_tokens)
    drafts = _draft_shapes(decode, config, fewer=fewer_drafts)
    likeliest = _likeliest_first(prompts, beside)
    prompt_shapes = [*likeliest, *prompts.large, *beside.large]
    first = [shape for shape in prompt_shapes if _is_of_few_clients(shape, seqs)]
    deferred = [
        StepShape(decode_rows=0, draws=shape.draws, deferred_draws=True)
        for shape in decode
    ]
    sampled = partial(_with_sampling, add_splits)
    order = (
        sampled(decode, likely, short),
        sampled(deferred if grammars else [], likely, short),
        sampled([*drafts.usual, *drafts.fewer], likely, short),
        sampled(first, likely, short),
        sampled(likeliest, likely, short),
        sampled([*decode, *drafts.usual], refiltered, short),
        sampled([*decode, *drafts.usual], likely, longer),
        sampled(drafts.fewer, likely, longer),
        sampled(drafts.fewer, refiltered, short),
        sampled([*prompts.fewest_chunks, *beside.fewest_chunks], refiltered, short),
        sampled(decode, scored, short),
        sampled([*prompts.more_chunks, *prompts.fewest_chunks], scored, short),
        sampled([*prompts.more_chunks, *beside.more_chunks], refiltered, short),
        sampled([*decode, *prompts.fewest_chunks], shaped, short),
        sampled([*beside.large, *prompts.large], likely, short),
        sampled([*beside.fewest_chunks, *beside.more_chunks], likely, longer),
        sampled(decode, refiltered, longer),
    )
    shapes = [shape for group in order for shape in group]
    if config.adapter_slots:
        shapes = [both for shape in shapes for both in _without_and_with_adapters(shape)]
    if grammars:
        shapes = [
            evolve(shape, keeps_logits=not shape.deferred_draws) for shape in shapes
        ]
    return [*dict.fromkeys(shapes)]


def _without_and_with_adapters(shape: StepShape) -> list[StepShape]:
    """Returns a shape of rows without adapters, and that of rows of which some have one.
    Deferred draws are the same.
    """
    return [shape] if shape.deferred_draws else [shape, evolve(shape, adapters=True)]


def _is_of_few_clients(shape: StepShape, seqs: int) -> bool:
    """Returns whether a step with prompts is typical of a load of few clients."""
    few_rows = mixed_bucket_of(min(MAX_LONE_CHUNK_ROWS, seqs), shape.tokens, seqs)
    if shape.decode_rows > few_rows or shape.longest > MIN_LONGEST_TOKENS:
        return False
    if shape.chunks == 1:
        return True
    return shape.chunks == CHUNK_SIZES[1] and shape.tokens in SEVERAL_PROMPT_TOKENS


def _likeliest_first(*groups: "PrefillShapes") -> list[StepShape]:
    """Returns the shapes of few and of several chunks, and those of usual prompts that
    fill large steps, sorted by the doublings of rows and of tokens that they serve.
    """
    more_chunks = {shape for group in groups for shape in group.more_chunks}
    shapes = [shape for group in groups for shape in group.fewest_chunks]
    shapes += more_chunks
    large = [shape for group in groups for shape in group.large]
    shapes += filter(_is_of_usual_prompts, large)
    tokens = _doublings((shape.tokens for shape in shapes), MIN_TOKENS)
    tokens[max(tokens)] += FULL_DOUBLINGS
    rows = {
        count: _doublings(
            (shape.decode_rows for shape in shapes if shape.tokens == count), MIN_ROWS
        )
        for count in tokens
    }

    def likely(shape: StepShape) -> float:
        chunks = SEVERAL_LIKELIHOOD if shape in more_chunks else 1.0
        decode_rows = rows[shape.tokens].get(shape.decode_rows, IDLE_DOUBLINGS)
        return chunks * decode_rows * tokens[shape.tokens]

    return sorted(
        shapes, key=lambda shape: (-likely(shape), shape.tokens, shape.decode_rows)
    )


def _is_of_usual_prompts(shape: StepShape) -> bool:
    """Returns whether prompts of usual lengths fill a step with many prefill tokens."""
    usual_length = shape.tokens // shape.chunks in USUAL_PROMPT_TOKENS
    return usual_length and shape.longest == MIN_LONGEST_TOKENS


def _doublings(counts: Iterable[int], least: float) -> dict[int, float]:
    """Returns how many doublings each size but 0 serves: from the next smaller size to
    itself, or from `least` if it is the smallest.
    """
    sizes = sorted({*counts} - {0})
    starts = [least, *sizes]
    return {size: log2(size / start) for size, start in zip(sizes, starts, strict=False)}


def _with_sampling(
    add_splits: AddSplits,
    shapes: Sequence[StepShape],
    needs: SamplingNeeds,
    contexts: Sequence[int],
) -> Iterator[StepShape]:
    """Yields the shapes with these sampling needs, for each of the contexts."""
    for context in contexts:
        for shape in shapes:
            drawn = evolve(
                shape,
                filtered=needs.filtered,
                scored=needs.scored,
                shaped=needs.shaped,
            )
            yield add_splits(drawn, context)


@frozen
class PrefillShapes:
    """Shapes with prefill tokens."""

    fewest_chunks: list[StepShape]  # with the smallest number of chunks that has a graph
    more_chunks: list[StepShape]
    large: list[StepShape]  # many chunks or tokens


def _decode_shapes(config: EngineConfig) -> list[StepShape]:
    """Returns pure decode steps, by size."""
    sizes = {bucket_of(n, DECODE_DIVISIONS) for n in range(1, config.max_num_seqs + 1)}
    return [StepShape(decode_rows=n, draws=n) for n in sorted(sizes)]


@frozen
class DraftShapes:
    """Shapes in which all decode rows have drafts."""

    usual: list[StepShape]  # with the most drafts
    fewer: list[StepShape]


def _draft_shapes(
    shapes: Sequence[StepShape], config: EngineConfig, *, fewer: bool
) -> DraftShapes:
    """Returns these shapes with drafts, if there is speculation; `fewer`: also with fewer
    than the most drafts.
    """
    spec_config, draft_shapes = config.speculation, DraftShapes([], [])
    if spec_config is None:
        return draft_shapes
    max_drafts = padded_drafts(spec_config.drafts)
    fewer_counts = sorted({padded_drafts(n) for n in range(1, max_drafts)}, reverse=True)
    rows = bucket_of(
        min(spec_config.rows or config.max_num_seqs, config.max_num_seqs),
        DECODE_DIVISIONS,
    )
    for shape in shapes:
        room = max_step_drafts(config) // max(1, shape.decode_rows)
        if not 0 < shape.decode_rows <= rows or not room:
            continue
        drafting = evolve(
            shape, verified=shape.decode_rows, proposes=spec_config.drafter == DEVICE
        )
        draft_shapes.usual.append(evolve(drafting, drafts=min(max_drafts, room)))
        if fewer:
            draft_shapes.fewer.extend(
                evolve(drafting, drafts=n) for n in fewer_counts if n < room
            )
    return draft_shapes


def _prefill_shapes(
    sizes: Sequence[int], config: EngineConfig, max_tokens: int
) -> PrefillShapes:
    """Returns the shapes with prefill tokens beside each of `sizes` decode rows."""
    budget = min(max_tokens, padded_tokens(config.max_num_batched_tokens))
    counts = sorted({padded_tokens(n) for n in range(1, budget + 1, 64)})
    inputs = [(n, m) for n in counts for m in sorted({min(n, MIN_LONGEST_TOKENS), n})]
    prefill_shapes = PrefillShapes([], [], [])
    for decode_rows in sizes:
        for chunks, (tokens, longest) in product(CHUNK_SIZES, inputs):
            shape = StepShape(
                decode_rows=decode_rows,
                draws=decode_rows + chunks,
                tokens=tokens,
                chunks=chunks,
                longest=longest,
            )
            if shape.padded(config.max_num_seqs) != shape or not shape.fits(max_tokens):
                continue
            # impossible: a lone chunk has all tokens
            if chunks == 1 and longest < tokens:
                continue
            min_chunks = 1 if decode_rows <= MAX_LONE_CHUNK_ROWS else CHUNK_SIZES[1]
            if tokens > MAX_USUAL_TOKENS or chunks == CHUNK_SIZES[-1]:
                prefill_shapes.large.append(shape)
            elif chunks == min_chunks:
                prefill_shapes.fewest_chunks.append(shape)
            else:
                prefill_shapes.more_chunks.append(shape)
    return prefill_shapes
