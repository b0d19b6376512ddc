"""How long recent steps took, by the times of the turns in which their results came.

Theory. Steps run one after the other. A step begins when the one before it ends, or when
it is planned if no other is in flight. It ends in the turn in which its results come.
Two durations are estimated: that of a step of decode rows alone, and what each prefill
token adds to it. Both are averages of recent steps, so they follow the model, the device
and the load.

The cost of a prefill token is not constant: it is close to nothing until the products
take longer than reading the weights. So a measurement with few tokens says little about
many more:

- A step takes at most `MAX_GROWTH` times as many prefill tokens as recent ones did.
- The estimated cost rises quickly and falls slowly. If it fell quickly, one step in a few
  would take too many tokens.
"""

from math import inf
from typing import Final

from attrs import frozen

from minfer.values.record import evolve

# The weight of the last step in the averages: of `decode`, and of `token` if it rises or
# falls.
DECODE_WEIGHT: Final = 1 / 8
RISE_WEIGHT: Final = 1 / 2
FALL_WEIGHT: Final = 1 / 64
# A measurement counts as at most this number of times the average: a step that waited for
# a compilation says little about the next ones.
MAX_OUTLIER: Final = 4.0
MAX_GROWTH: Final = 2  # of the prefill tokens from one step to the next
# Fewer prefill tokens cost as much as this number: CUDA graphs pad them to a multiple.
PADDED_TOKENS: Final = 64


@frozen
class StepTimes:
    """Durations of recent steps, in seconds."""

    began: float = 0.0  # when the first step in flight began
    decode: float = 0.0  # of a step of decode rows alone; 0: not known
    token: float = 0.0  # that each prefill token adds; 0: nothing, or not known
    tokens: int = 0  # prefill tokens beside decode rows in the last steps; 0: not known

    def after(self, time: float, decoding: int, tokens: int) -> "StepTimes":
        """The durations after a step with `decoding` decode rows and `tokens` prefill
        tokens has ended at `time`.
        """
        seconds = time - self.began
        # The results of two steps may come in one turn; the second has no duration then.
        if not 0 < seconds < inf or not decoding:
            return evolve(self, began=max(time, self.began))
        if not tokens:
            decode = _average(self.decode, seconds, DECODE_WEIGHT)
            return StepTimes(time, decode, self.token, self.tokens)
        if not self.decode:
            return evolve(self, began=time)
        added = max(0.0, seconds - self.decode) / max(tokens, PADDED_TOKENS)
        weight = RISE_WEIGHT if added > self.token else FALL_WEIGHT
        # The last chunk of a prompt says nothing about how large chunks may be.
        most = max(tokens, self.tokens // MAX_GROWTH)
        return StepTimes(time, self.decode, _average(self.token, added, weight), most)

    def tokens_within(self, seconds: float) -> int:
        """The prefill tokens with which a step takes at most `seconds`, by what is known;
        0 if decode rows alone take longer, or if nothing is known yet.
        """
        left, most = seconds - self.decode, MAX_GROWTH * self.tokens
        if not self.decode or left <= 0:
            return 0
        return most if most * self.token <= left else int(left / self.token)


NOT_MEASURED: Final = StepTimes()


def _average(known: float, last: float, weight: float) -> float:
    """The average `known` after one more value; 0: there is no value yet."""
    return known + weight * (min(last, MAX_OUTLIER * known) - known) if known else last
