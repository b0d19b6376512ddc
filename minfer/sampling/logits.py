"""Changes to logits before a token is sampled, on plain values.

Theory. The log-probabilities that clients get are the model's own, taken before any
change. Then, in vLLM's order and each in float32 with every operation rounded, as on a
device, for a prompt and an output:

    a grammar's mask        every id that is not allowed becomes -inf
    (`minfer.records.plan.Mask`)
    allowed_token_ids       every other id becomes -inf
    bad_words               the last token of a bad word becomes -inf, if the output ends
                            with the other tokens of the word
    min_tokens              ids that end the output become -inf, until it has so many
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


def is_penalized(how: RowValues) -> bool:
    """Whether logits depend on the tokens before."""
    return bool(
        how.repetition_penalty != 1 or how.frequency_penalty or how.presence_penalty
    )


def is_shaped(how: Shaping) -> bool:
    """Whether any logit may be changed."""
    few = how.logit_bias or how.bad_words or (how.min_tokens and how.stop_ids)
    return bool(few) or how.allowed_token_ids is not None or is_penalized(how)


def hidden(how: Shaping, output: Sequence[int]) -> Iterator[int]:
    """The ids that are not allowed after `output`, besides those that are never
    allowed.
    """
    if len(output) < how.min_tokens:
        yield from how.stop_ids
    for word in how.bad_words:
        begun = len(word) - 1
        if begun <= len(output) and tuple(output[len(output) - begun :]) == word[:-1]:
            yield word[-1]


def shaped(
    logits: Sequence[float], how: Shaping, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Logits [vocab] with all changes, for the token after prompt and output."""
    made = [f32(logit) for logit in logits]
    if how.allowed_token_ids is not None:
        allowed = frozenset(how.allowed_token_ids)
        made = [x if t in allowed else -math.inf for t, x in enumerate(made)]
    for token in hidden(how, output):
        if token < len(made):
            made[token] = -math.inf
    for token, bias in how.logit_bias:
        made[token] = f32(made[token] + f32(bias))
    if is_penalized(how):
        counts = Counter(output)
        for token in counts.keys() | set(prompt):
            made[token] = penalized(made[token], how, counts[token])
    return made


def penalized(x: float, how: RowValues, count: int) -> float:
    """The logit of a token of prompt or output, of which the output has `count`."""
    factor = f32(how.repetition_penalty)
    x = f32(x / factor) if x > 0 else f32(x * factor)
    x = f32(x - f32(f32(how.frequency_penalty) * count))
    return f32(x - f32(how.presence_penalty)) if count else x
