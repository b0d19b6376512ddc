"""Changes to logits before a token is sampled, on plain values.

Theory. The log-probabilities that clients get are the model's own, taken before any
change. Then, in vLLM's order and each in float32 with every operation rounded, as on a
device, for a prompt and an output:

    a grammar's mask        every id that is not allowed becomes -inf
    (`minfer.records.plan.Mask`)
    allowed_token_ids       every other id becomes -inf
    bad_words               the last token of a bad word becomes -inf, if the output ends
                            with the other tokens of the word
    min_tokens              ids that end the output become -inf, until it has as many
    logit_bias              is added
    repetition_penalty      x -> x / r, or x * r if x <= 0, for tokens of either
    frequency_penalty       x -> x - f * count in the output
    presence_penalty        x -> x - p, for tokens of the output

`minfer.sampling.reference_sampler` samples from the result, greedily as well. It is a
function of the logits, the request's parameters and the tokens before: neither other
requests nor preemption nor the chunks of a prompt matter.

-inf stays -inf whatever is added, so except for the mask the order matters only where a
bias changes the sign that repetition_penalty looks at.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import frozen

from minfer.sampling.params import RowValues


@frozen(kw_only=True)
class Shaping(RowValues):
    """All parameters that change one row's logits, as token ids."""

    stop_ids: frozenset[int] = frozenset()  # those that end it
    min_tokens: int = 0  # of output, until which `stop_ids` are hidden
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, what is added
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # none of which may be output


def f32(x: float) -> float:
    """`x`, rounded to float32; too large values become infinite."""
    return array("f", (x,))[0]


def is_penalized(sampling: RowValues) -> bool:
    """Whether logits depend on the tokens before."""
    return bool(
        sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def is_shaped(sampling: Shaping) -> bool:
    """Whether any logit may be changed."""
    hides = sampling.bad_words or (sampling.min_tokens and sampling.stop_ids)
    changes_some = bool(sampling.logit_bias or hides)
    restricts = sampling.allowed_token_ids is not None
    return changes_some or restricts or is_penalized(sampling)


def hidden_ids(sampling: Shaping, output: Sequence[int]) -> Iterator[int]:
    """The ids that are not allowed after `output`, besides those that are never
    allowed.
    """
    if len(output) < sampling.min_tokens:
        yield from sampling.stop_ids
    for word in sampling.bad_words:
        num_before = len(word) - 1
        if (
            num_before <= len(output)
            and tuple(output[len(output) - num_before :]) == word[:-1]
        ):
            yield word[-1]


def shape_logits(
    logits: Sequence[float],
    sampling: Shaping,
    prompt: Sequence[int],
    output: Sequence[int],
) -> list[float]:
    """Logits [vocab] with all changes, for the token after prompt and output."""
    values = [f32(logit) for logit in logits]
    if sampling.allowed_token_ids is not None:
        allowed = frozenset(sampling.allowed_token_ids)
        values = [x if t in allowed else -math.inf for t, x in enumerate(values)]
    for token in hidden_ids(sampling, output):
        if token < len(values):
            values[token] = -math.inf
    for token, bias in sampling.logit_bias:
        values[token] = f32(values[token] + f32(bias))
    if is_penalized(sampling):
        counts = Counter(output)
        for token in counts.keys() | set(prompt):
            values[token] = penalize(values[token], sampling, counts[token])
    return values


def penalize(x: float, sampling: RowValues, count: int) -> float:
    """The logit of a token of prompt or output, of which the output has `count`."""
    factor = f32(sampling.repetition_penalty)
    x = f32(x / factor) if x > 0 else f32(x * factor)
    x = f32(x - f32(f32(sampling.frequency_penalty) * count))
    return f32(x - f32(sampling.presence_penalty)) if count else x
