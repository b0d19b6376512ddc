"""The best of several samples: those with the highest mean log-probability of tokens.

The mean, not the sum: of two texts, the shorter one would nearly always win.
"""

import math
from collections.abc import Sequence

from attrs import evolve

from minfer.effects.text.outputs import CompletionOutput

_COMPLETE_REASONS = ("stop", "length")  # reasons of a sample that came to its end


def best_of(
    samples: Sequence[CompletionOutput], count: int, *, scored: bool
) -> list[CompletionOutput]:
    """The best samples, at most `count`, the likeliest first; numbered anew.

    Equally likely samples stay in the order of their index. Samples that failed or were
    cancelled come last. `scored`: log-probabilities were requested.
    """
    ranked = sorted(samples, key=_rank)[:count]
    return [
        evolve(sample, index=index, logprobs=sample.logprobs if scored else None)
        for index, sample in enumerate(ranked)
    ]


def _rank(sample: CompletionOutput) -> tuple[bool, float, int]:
    mean = -math.inf
    if sample.token_ids and sample.cumulative_logprob is not None:
        mean = sample.cumulative_logprob / len(sample.token_ids)
    return sample.finish_reason not in _COMPLETE_REASONS, -mean, sample.index
