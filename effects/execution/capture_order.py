"""Which kinds of steps get CUDA graphs before the first request, and in which order.

Theory. There are more kinds than there is time for: two hundred of some 15 ms each, and
many of them never come. What every request needs comes first: steps in which all rows
feed themselves, at every size, drawing as requests do that say nothing of it; where
there is speculation, such steps again, in which all of these rows have drafts, as many as
there may be, and then each smaller number: which of them pays differs from step to step,
and a step that is launched kernel by kernel loses more than its drafts win. (Beside
prompts these rows are a forward of their own: packing.py.) Then prompts, alone and beside
rows without drafts: all of those beside at most `LONELY` rows, as the first load of a
server is mostly of few clients, and its steps are so short that launching them kernel by
kernel takes several times as long. Where grammars can be asked for, any of these steps
may have rows that are sampled apart; draws that come late, which are a few launches, come
after steps in which all rows feed themselves. Then what few ask for: other ways to draw,
contexts that are cut otherwise, many prompts at once. Steps of many inputs come last:
launching them takes no longer than their work.

There is time for half of the prompts' kinds beside more rows. How many rows decode beside
them and how long they are is not known before requests come, only that both vary by
factors: a server has 2 streams or 40, and a prompt leaves 20 inputs or 600. So each
doubling is taken to be as likely as another, and a kind to be as likely as the doublings
that it serves, of rows times of inputs. Short prompts come first beside every number of
rows, and most beside usual ones; whoever went through one number of rows after the other
would be out of time at 32, and a burst of newcomers beside 40 streams would be launched
kernel by kernel.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product
from math import log2
from typing import Final

from attrs import evolve, frozen

from minfer.config import EngineConfig
from minfer.effects.execution.device_rows import Wants
from minfer.effects.execution.step_shape import (
    CHUNK_SIZES,
    DECODE,
    LONELY,
    LONGEST,
    StepShape,
    bucket_of,
    mixed_bucket_of,
)
from minfer.effects.models.shapes import drafts_from, most_drafts, padded_tokens
from minfer.speculate.settings import DEVICE

MANY_INPUTS: Final = 2048  # from history: more take the GPU longer than the host
# Inputs of several prompts at once, in loads of few clients.
SEVERAL_INPUTS: Final = range(256, 4096 + 1)
# How likely prompts are beside no row, in doublings of rows; and several of them beside
# few rows, by one alone.
IDLE: Final = 0.5
SEVERAL: Final = 0.25
# A kind, whose contexts of up to so many tokens are cut.
Cut = Callable[[StepShape, int], StepShape]


def capture_order(
    config: EngineConfig,
    most: int,
    likely: Wants,
    contexts: Sequence[int],
    cut: Cut,
    *,
    grammars: bool = False,
    fewer_drafts: bool = False,
) -> list[StepShape]:
    """Kinds that can have graphs, the most useful first, each once.

    most: inputs from history that a graph may have. likely: how those draw who say
    nothing of it. contexts: lengths by which kernels are chosen, the shortest first.
    grammars: whether some can be asked for. fewer_drafts: whether rows have as many as
    pay, which is told to the engine after this (`config` may not say it yet).
    """
    short, longer = contexts[:1], contexts[1:]
    other = evolve(likely, filtered=not likely.filtered)
    scored = evolve(likely, scored=not likely.scored)
    shaped = evolve(likely, shaped=not likely.shaped)
    decode = _decode(config)
    sizes = sorted({mixed_bucket_of(shape.decode_rows) for shape in decode})
    prompts = _with_history([0], config, most)
    beside = _with_history(sizes, config, most)
    drafts = _with_drafts(decode, config, fewer=fewer_drafts)
    likeliest = _likeliest_first(prompts, beside)
    every = [*likeliest, *prompts.many, *beside.many]
    first = [shape for shape in every if _is_of_few_clients(shape)]
    late = [StepShape(decode_rows=0, draws=shape.draws, late=True) for shape in decode]
    told = partial(_told, cut)
    order = (
        told(decode, likely, short),
        told(late if grammars else [], likely, short),
        told([*drafts.usual, *drafts.fewer], likely, short),
        told(first, likely, short),
        told(likeliest, likely, short),
        told([*decode, *drafts.usual], other, short),
        told([*decode, *drafts.usual], likely, longer),
        told(drafts.fewer, likely, longer),
        told(drafts.fewer, other, short),
        told([*prompts.few, *beside.few], other, short),
        told(decode, scored, short),
        told([*prompts.several, *prompts.few], scored, short),
        told([*prompts.several, *beside.several], other, short),
        told([*decode, *prompts.few], shaped, short),
        told([*beside.many, *prompts.many], likely, short),
        told([*beside.few, *beside.several], likely, longer),
        told(decode, other, longer),
    )
    shapes = [shape for part in order for shape in part]
    if grammars:
        shapes = [evolve(shape, apart=not shape.late) for shape in shapes]
    return [*dict.fromkeys(shapes)]


def _is_of_few_clients(shape: StepShape) -> bool:
    """Whether a step with prompts is one of a load of few clients."""
    if shape.decode_rows > LONELY or shape.longest > LONGEST:
        return False
    if shape.chunks == 1:
        return True
    return shape.chunks == CHUNK_SIZES[1] and shape.tokens in SEVERAL_INPUTS


def _likeliest_first(*found: "WithHistory") -> list[StepShape]:
    """Those of few and of several chunks, by the doublings of rows and of inputs that
    they serve.
    """
    several = {shape for one in found for shape in one.several}
    shapes = [*(shape for one in found for shape in one.few), *several]
    rows = _doublings(shape.decode_rows for shape in shapes) | {0: IDLE}
    inputs = _doublings(shape.tokens for shape in shapes)

    def likely(shape: StepShape) -> float:
        decode_rows = SEVERAL if shape in several else 1.0
        return decode_rows * rows[shape.decode_rows] * inputs[shape.tokens]

    return sorted(
        shapes, key=lambda shape: (-likely(shape), shape.tokens, shape.decode_rows)
    )


def _doublings(counts: Iterable[int]) -> dict[int, float]:
    """How many each size serves: those between the size below it and itself. The
    smallest is taken to serve one, as are the 64 inputs of the shortest prompts.
    """
    sizes = sorted({*counts} - {0})
    served = {size: log2(size / below) for below, size in pairwise(sizes)}
    return served | dict.fromkeys(sizes[:1], 1.0)


def _told(
    cut: Cut, shapes: Sequence[StepShape], wants: Wants, contexts: Sequence[int]
) -> Iterator[StepShape]:
    """Kinds as they are for rows that draw so, at each of the contexts."""
    for context in contexts:
        for shape in shapes:
            drawn = evolve(
                shape,
                filtered=wants.filtered,
                scored=wants.scored,
                shaped=wants.shaped,
            )
            yield cut(drawn, context)


@frozen
class WithHistory:
    """Kinds with inputs from history."""

    few: list[StepShape]  # as few chunks as there is a size for
    several: list[StepShape]
    many: list[StepShape]  # chunks, or inputs


def _decode(config: EngineConfig) -> list[StepShape]:
    """Steps in which every row feeds itself, by size."""
    sizes = {bucket_of(n, DECODE) for n in range(1, config.max_num_seqs + 1)}
    return [StepShape(decode_rows=n, draws=n) for n in sorted(sizes)]


@frozen
class WithDrafts:
    """Kinds in which all rows that feed themselves have drafts."""

    usual: list[StepShape]  # as many as there may be
    fewer: list[StepShape]


def _with_drafts(
    shapes: Sequence[StepShape], config: EngineConfig, *, fewer: bool
) -> WithDrafts:
    """These kinds with drafts, where there are any; `fewer`: also than the most."""
    how, found = config.speculation, WithDrafts([], [])
    if how is None:
        return found
    most = drafts_from(how.drafts)
    few = sorted({drafts_from(n) for n in range(1, most)}, reverse=True)
    rows = bucket_of(min(how.rows or config.max_num_seqs, config.max_num_seqs), DECODE)
    for shape in shapes:
        room = most_drafts(config) // max(1, shape.decode_rows)
        if not 0 < shape.decode_rows <= rows or not room:
            continue
        drafting = evolve(
            shape, verified=shape.decode_rows, proposes=how.drafter == DEVICE
        )
        found.usual.append(evolve(drafting, drafts=min(most, room)))
        if fewer:
            found.fewer.extend(evolve(drafting, drafts=n) for n in few if n < room)
    return found


def _with_history(sizes: Sequence[int], config: EngineConfig, most: int) -> WithHistory:
    """Those beside `sizes` of rows that feed themselves."""
    budget = min(most, padded_tokens(config.max_num_batched_tokens))
    counts = sorted({padded_tokens(n) for n in range(1, budget + 1, 64)})
    inputs = [(n, m) for n in counts for m in sorted({min(n, LONGEST), n})]
    found = WithHistory([], [], [])
    for decode_rows in sizes:
        for chunks, (tokens, longest) in product(CHUNK_SIZES, inputs):
            shape = StepShape(
                decode_rows=decode_rows,
                draws=decode_rows + chunks,
                tokens=tokens,
                chunks=chunks,
                longest=longest,
            )
            if shape.padded() != shape or not shape.fits(most):
                continue
            if chunks == 1 and longest < tokens:  # it cannot be
                continue
            fewest = 1 if decode_rows <= LONELY else CHUNK_SIZES[1]
            if tokens > MANY_INPUTS or chunks == CHUNK_SIZES[-1]:
                found.many.append(shape)
            elif chunks == fewest:
                found.few.append(shape)
            else:
                found.several.append(shape)
    return found
