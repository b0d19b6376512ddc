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
from minfer.effects.execution.kinds import (
    CHUNK_SIZES,
    DECODE,
    LONELY,
    LONGEST,
    Kind,
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
Cut = Callable[[Kind, int], Kind]


def capture_order(
    config: EngineConfig,
    most: int,
    likely: Wants,
    contexts: Sequence[int],
    cut: Cut,
    *,
    grammars: bool = False,
    fewer_drafts: bool = False,
) -> list[Kind]:
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
    sizes = sorted({mixed_bucket_of(kind.alone) for kind in decode})
    prompts = _with_history([0], config, most)
    beside = _with_history(sizes, config, most)
    drafts = _with_drafts(decode, config, fewer=fewer_drafts)
    likeliest = _likeliest_first(prompts, beside)
    every = [*likeliest, *prompts.many, *beside.many]
    first = [kind for kind in every if _is_of_few_clients(kind)]
    late = [Kind(alone=0, draws=kind.draws, late=True) for kind in decode]
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
    kinds = [kind for part in order for kind in part]
    if grammars:
        kinds = [evolve(kind, apart=not kind.late) for kind in kinds]
    return [*dict.fromkeys(kinds)]


def _is_of_few_clients(kind: Kind) -> bool:
    """Whether a step with prompts is one of a load of few clients."""
    if kind.alone > LONELY or kind.longest > LONGEST:
        return False
    if kind.chunks == 1:
        return True
    return kind.chunks == CHUNK_SIZES[1] and kind.tokens in SEVERAL_INPUTS


def _likeliest_first(*found: "WithHistory") -> list[Kind]:
    """Those of few and of several chunks, by the doublings of rows and of inputs that
    they serve.
    """
    several = {kind for one in found for kind in one.several}
    kinds = [*(kind for one in found for kind in one.few), *several]
    rows = _doublings(kind.alone for kind in kinds) | {0: IDLE}
    inputs = _doublings(kind.tokens for kind in kinds)

    def likely(kind: Kind) -> float:
        alone = SEVERAL if kind in several else 1.0
        return alone * rows[kind.alone] * inputs[kind.tokens]

    return sorted(kinds, key=lambda kind: (-likely(kind), kind.tokens, kind.alone))


def _doublings(counts: Iterable[int]) -> dict[int, float]:
    """How many each size serves: those between the size below it and itself. The
    smallest is taken to serve one, as are the 64 inputs of the shortest prompts.
    """
    sizes = sorted({*counts} - {0})
    served = {size: log2(size / below) for below, size in pairwise(sizes)}
    return served | dict.fromkeys(sizes[:1], 1.0)


def _told(
    cut: Cut, kinds: Sequence[Kind], wants: Wants, contexts: Sequence[int]
) -> Iterator[Kind]:
    """Kinds as they are for rows that draw so, at each of the contexts."""
    for context in contexts:
        for kind in kinds:
            drawn = evolve(
                kind,
                filtered=wants.filtered,
                scored=wants.scored,
                shaped=wants.shaped,
            )
            yield cut(drawn, context)


@frozen
class WithHistory:
    """Kinds with inputs from history."""

    few: list[Kind]  # as few chunks as there is a size for
    several: list[Kind]
    many: list[Kind]  # chunks, or inputs


def _decode(config: EngineConfig) -> list[Kind]:
    """Steps in which every row feeds itself, by size."""
    sizes = {bucket_of(n, DECODE) for n in range(1, config.max_num_seqs + 1)}
    return [Kind(alone=n, draws=n) for n in sorted(sizes)]


@frozen
class WithDrafts:
    """Kinds in which all rows that feed themselves have drafts."""

    usual: list[Kind]  # as many as there may be
    fewer: list[Kind]


def _with_drafts(
    kinds: Sequence[Kind], config: EngineConfig, *, fewer: bool
) -> WithDrafts:
    """These kinds with drafts, where there are any; `fewer`: also than the most."""
    how, found = config.speculation, WithDrafts([], [])
    if how is None:
        return found
    most = drafts_from(how.drafts)
    few = sorted({drafts_from(n) for n in range(1, most)}, reverse=True)
    rows = bucket_of(min(how.rows or config.max_num_seqs, config.max_num_seqs), DECODE)
    for kind in kinds:
        room = most_drafts(config) // max(1, kind.alone)
        if not 0 < kind.alone <= rows or not room:
            continue
        drafting = evolve(kind, verified=kind.alone, proposes=how.drafter == DEVICE)
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
    for alone in sizes:
        for chunks, (tokens, longest) in product(CHUNK_SIZES, inputs):
            kind = Kind(
                alone=alone,
                draws=alone + chunks,
                tokens=tokens,
                chunks=chunks,
                longest=longest,
            )
            if kind.padded() != kind or not kind.fits(most):
                continue
            if chunks == 1 and longest < tokens:  # it cannot be
                continue
            fewest = 1 if alone <= LONELY else CHUNK_SIZES[1]
            if tokens > MANY_INPUTS or chunks == CHUNK_SIZES[-1]:
                found.many.append(kind)
            elif chunks == fewest:
                found.few.append(kind)
            else:
                found.several.append(kind)
    return found
