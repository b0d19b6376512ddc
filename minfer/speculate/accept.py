"""Which drafts stand: those that the target would have drawn.

Theory. Whatever the drafts, a row yields the tokens that it would yield without: the
token at a position is the target's own draw with that position's own noise
(`minfer.sample`), and a draft is accepted if and only if it is that token. So neither
drafts nor their number nor load can change an output, greedy or sampled, and where drafts
may be wrong they cost time only.

What the target says behind a draft holds if that draft and all before it were accepted:
the first that is wrong ends the row's step, with the right token in its place. Penalties
count accepted tokens like all others, and the mask of a place is the one that a grammar
allows behind the drafts before it.

A draft model that samples should use the same noise: where its distribution is near the
target's, so are its draws. With total variation TV between the two, at least
(1 - TV) / (1 + TV) of its drafts are accepted, where 1 - TV is the most that any rule
could accept (Daliri et al. 2024).
"""

import math
from collections.abc import Sequence

from attrs import frozen

from minfer.sample import RowSampling, draw
from minfer.shape import shaped


@frozen(kw_only=True)
class Target:
    """What the target model says of one row: after its known tokens, and after each
    draft.
    """

    how: RowSampling
    known: tuple[int, ...]  # tokens of prompt and output
    prompt: int  # how many of them are the prompt's
    logits: tuple[Sequence[float], ...]  # [drafts + 1, vocab]
    masks: tuple[bytes, ...] = ()  # for each of them, as in `minfer.plan.Mask`; or none

    def shaped(self, accepted: Sequence[int]) -> list[float]:
        """Logits [vocab] from which the token after the accepted drafts is drawn."""
        place = len(accepted)
        output = (*self.known[self.prompt :], *accepted)
        said = self.logits[place]
        allowed = masked(said, self.masks[place]) if self.masks else said
        return shaped(allowed, self.how, self.known[: self.prompt], output)


@frozen
class Verdict:
    """What comes of a row's drafts."""

    tokens: tuple[int, ...]  # that it yields: accepted drafts, and the one after them
    proposed: int  # drafts

    @property
    def accepted(self) -> int:
        """Of the drafts: the token after them is none."""
        return len(self.tokens) - 1


def masked(logits: Sequence[float], bits: bytes) -> Sequence[float]:
    """Logits [vocab] with -inf for what a mask does not allow; no bits allow all."""
    if not bits:
        return logits
    allowed = int.from_bytes(bits, "little")
    return [x if allowed >> t & 1 else -math.inf for t, x in enumerate(logits)]


def same_noise(target: Target, drafts: Sequence[int]) -> Verdict:
    """Accept drafts as long as they are what the target draws. Raises NotFiniteError."""
    how, tokens = target.how, list[int]()
    for draft in (*drafts, None):
        logits, position = target.shaped(tokens), len(target.known) + len(tokens)
        tokens.append(draw(logits, how, how.seed, how.sample, position))
        if tokens[-1] != draft:
            break
    return Verdict(tuple(tokens), len(drafts))
