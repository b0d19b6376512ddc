"""The best of several samples: those with the highest mean log-probability of tokens.

The mean, not the sum: of two texts, the shorter one would nearly always win.
"""

import math
from collections.abc import Sequence

from attrs import evolve

from minfer.effects.text.outputs import CompletionOutput

_WHOLE = ("stop", "length")  # reasons of a sample that came to its end


def best_of(
    samples: Sequence[CompletionOutput], count: int, *, scored: bool
) -> tuple[CompletionOutput, ...]:
    """The best samples, `count` of them or fewer, the likeliest first; numbered anew.

    Of equally likely ones, the one that began first. Samples that failed or were
    cancelled come last. `scored`: log-probabilities were requested.
    """
    ranked = sorted(samples, key=_rank)[:count]
    return tuple(
        evolve(one, index=at, logprobs=one.logprobs if scored else None)
        for at, one in enumerate(ranked)
    )


def _rank(one: CompletionOutput) -> tuple[bool, float, int]:
    mean = -math.inf
    if one.token_ids and one.cumulative_logprob is not None:
        mean = one.cumulative_logprob / len(one.token_ids)
    return one.finish_reason not in _WHOLE, -mean, one.index
