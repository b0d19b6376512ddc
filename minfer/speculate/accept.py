"""Default acceptance: the drafts that the target would have sampled.

Theory. Whatever the drafts, a row yields the tokens that it would yield without: the
token at a position is sampled from the target with that position's own noise
(`minfer.sampling.reference_sampler`), and a draft is accepted if and only if it is that
token. So neither drafts nor their number nor load can change an output, greedy or
sampled; wrong drafts only cost time.

The target's token after a draft counts if that draft and all before it were accepted: the
first rejected draft ends the row's step, with the right token in its place. Penalties
count accepted tokens like all others, and the mask of a place is the one that a grammar
allows after the drafts before it.

A draft model or head that samples should use the same noise: if its distribution is
close to the target's, so are its samples. With total variation TV between the two, at
least (1 - TV) / (1 + TV) of its drafts are accepted, where 1 - TV is the most that any
rule could accept (Daliri et al. 2024).
"""

import math
from collections.abc import Sequence

from attrs import frozen

from minfer.sampling.logits import shape_logits
from minfer.sampling.reference_sampler import RowSampling, draw


@frozen(kw_only=True)
class TargetOutput:
    """The output of the target model for one row: after its known tokens, and after each
    draft.
    """

    sampling: RowSampling
    tokens: tuple[int, ...]  # known ones of prompt and output
    num_prompt_tokens: int
    logits: tuple[Sequence[float], ...]  # [drafts + 1, vocab]
    masks: tuple[
        bytes, ...
    ] = ()  # for each of them, as in `minfer.records.plan.Mask`; or none

    def shape_logits(self, accepted: Sequence[int]) -> list[float]:
        """Logits [vocab] from which the token after the accepted drafts is sampled."""
        index = len(accepted)
        output = (*self.tokens[self.num_prompt_tokens :], *accepted)
        logits = self.logits[index]
        allowed = mask_logits(logits, self.masks[index]) if self.masks else logits
        return shape_logits(
            allowed, self.sampling, self.tokens[: self.num_prompt_tokens], output
        )


@frozen
class Verdict:
    """The result of verifying a row's drafts."""

    tokens: tuple[int, ...]  # that it yields: accepted drafts, and the token after them
    proposed: int  # drafts

    @property
    def accepted(self) -> int:
        """The number of accepted drafts: the token after them is not one."""
        return len(self.tokens) - 1


def mask_logits(logits: Sequence[float], bits: bytes) -> Sequence[float]:
    """Logits [vocab] with -inf for ids that a mask does not allow; no bits allow all."""
    if not bits:
        return logits
    allowed = int.from_bytes(bits, "little")
    return [x if allowed >> t & 1 else -math.inf for t, x in enumerate(logits)]


def same_noise(target: TargetOutput, drafts: Sequence[int]) -> Verdict:
    """Accept drafts while they equal the target's samples. Raises NotFiniteError."""
    sampling, tokens = target.sampling, list[int]()
    for draft in (*drafts, None):
        logits, position = target.shape_logits(tokens), len(target.tokens) + len(tokens)
        tokens.append(draw(logits, sampling, sampling.seed, sampling.sample, position))
        if tokens[-1] != draft:
            break
    return Verdict(tuple(tokens), len(drafts))
