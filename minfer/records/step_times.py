"""How long recent steps took, by the times of the turns in which their results came.

Theory. Steps run one after the other. So a step begins when the one before it has ended,
or when it is planned if none is in flight, and ends in the turn in which its results
come. A step of decode rows alone has a duration of its own; prefill tokens beside them
add to that. Both are averages of recent steps, so they follow the model, the device and
the load.

The cost of a prefill token is not constant: as long as reading the weights takes longer
than the products, it is close to nothing. So a few tokens say little about many more:

- A step takes at most `MAX_GROWTH` times as many tokens as the last ones did.
- The cost rises at once and falls slowly. If both were quick, every few steps would take
  too many tokens to find out again that they do.
"""

from math import inf
from typing import Final

from attrs import frozen

from minfer.values.record import evolve

# Weights of the last step in the averages.
DECODE_WEIGHT: Final = 1 / 8
RISE_WEIGHT: Final = 1 / 2
FALL_WEIGHT: Final = 1 / 64
# A step counts as at most so many times the average: one that waited for a compilation
# says little about the next ones.
MAX_OUTLIER: Final = 4.0
MAX_GROWTH: Final = 2  # of the prefill tokens from one step to the next
# Prefill tokens that cost as much as fewer: CUDA graphs are padded to a multiple.
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
        if not 0 < seconds < inf or not decoding:  # two may have ended in one turn
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
        """The prefill tokens with which a step takes at most so long, as far as is known;
        0 if even decode rows alone take longer.
        """
        left, most = seconds - self.decode, MAX_GROWTH * self.tokens
        if not self.decode or left <= 0:
            return 0
        return most if most * self.token <= left else int(left / self.token)


NOT_MEASURED: Final = StepTimes()


def _average(known: float, last: float, weight: float) -> float:
    """An average after one more value; 0 is none."""
    return known + weight * (min(last, MAX_OUTLIER * known) - known) if known else last
