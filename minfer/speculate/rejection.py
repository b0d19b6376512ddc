"""Acceptance by modified rejection sampling: the distribution is kept, the tokens are
not.

Theory (Leviathan et al. 2023, Chen et al. 2023). With p the target's distribution at a
position and q the one that the draft was sampled from, a draft d is accepted with
probability min(1, p(d) / q(d)); else a token is sampled from max(0, p - q), renormalised.
Either way the token has distribution p. The share 1 - TV(p, q) is accepted, which is the
most that any rule can. For a draft that was not sampled (found in a text, or greedy), q
is 1 at the draft. p and q are taken after temperature, filters, penalties and masks.

The draft, the coin and the replacement must be independent, so there are three streams of
noise. The last is the target's own: with no draft, the token is the one it would be
without speculation. (Drafts that are looked up in the output of another request with the
same seed are not independent of its noise: two requests with one seed are correlated.)

The tokens themselves are not kept. Which of them are drafts depends on how many are
proposed, so equal seeds give equal outputs only if that number is fixed. And it must not
depend on the drafts themselves: to propose only drafts that look likely is to sample from
another distribution than q. (The default rule, accept.py, has no such condition.)

Arithmetic is in float32, as in `minfer.sampling.reference_sampler`. Sums over a
vocabulary differ in their last bits between devices, which decides one coin in millions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from attrs import frozen

from minfer.sampling.logits import f32, shape_logits
from minfer.sampling.reference_sampler import (
    RowSampling,
    draw_key,
    noise_bits,
    pick,
    scores,
    stream,
    uniform,
)
from minfer.speculate.accept import TargetOutput, Verdict

_DRAFT: Final = 1  # streams derived from a sample's own, which is the third
_COIN: Final = 2

Chances = Mapping[int, float]  # token ids, rising -> probabilities; others have none


class Noise(Protocol):
    """The random numbers of a verdict."""

    def coin(self, position: int) -> float:
        """A number between 0 and 1, uniform."""

    def pick(self, scored: Mapping[int, float], position: int) -> int:
        """One of the tokens, with a probability that is proportional to exp(score)."""


@frozen
class Streams:
    """The noise of one sample of a request; all three are independent."""

    draft: int  # 64 bits each
    coins: int
    picks: int

    @classmethod
    def of(cls, seed: int, sample: int) -> "Streams":
        """The streams of a sample: the last is the one it has without speculation."""
        target_stream = stream(seed, sample)
        return cls(
            stream(target_stream, _DRAFT), stream(target_stream, _COIN), target_stream
        )

    def coin(self, position: int) -> float:
        """A number between 0 and 1, uniform."""
        return uniform(noise_bits(draw_key(self.coins, position), 0))

    def pick(self, scored: Mapping[int, float], position: int) -> int:
        """One of the tokens, with a probability that is proportional to exp(score)."""
        return pick(scored, self.picks, position)


@frozen
class SampledDraft:
    """A draft, and the distribution that it was sampled from."""

    token: int
    chances: Chances


def sample_draft(
    logits: Sequence[float],
    sampling: RowSampling,
    tokens: Sequence[int],
    num_prompt_tokens: int,
    streams: Streams,
) -> SampledDraft:
    """A draft after `tokens`, from a draft model's logits [vocab]. Raises
    NotFiniteError.
    """
    prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
    scored = scores(shape_logits(logits, sampling, prompt, output), sampling)
    return SampledDraft(pick(scored, streams.draft, len(tokens)), chances(scored))


def chances(scored: Mapping[int, float]) -> Chances:
    """Probabilities of tokens from their scores."""
    shares = {t: math.exp(score) for t, score in scored.items()}
    total = math.fsum(shares.values())
    return {t: f32(share / total) for t, share in shares.items()}


def accepts(coin: float, p: float, q: float) -> bool:
    """Whether a draft is accepted that has probability `p` for the target and had `q`:
    never if `p` is 0, always if `p` is at least `q`.
    """
    return p > 0 and f32(coin * q) <= p


def residual(p: Chances, q: Chances) -> dict[int, float]:
    """Scores of the tokens that may replace a rejected draft."""
    remaining = {t: f32(share - q.get(t, 0.0)) for t, share in p.items()}
    # If nothing is left, the two are equal but for rounding, and the draft itself may be
    # sampled.
    candidates = {t: share for t, share in remaining.items() if share > 0} or p
    return {t: f32(math.log(share)) for t, share in candidates.items() if share > 0}


def accept_or_replace(
    draft: int, p: Chances, q: Chances, noise: Noise, position: int
) -> int:
    """The token at a draft's place: the draft if its coin accepts it, or another."""
    if accepts(noise.coin(position), p.get(draft, 0.0), q[draft]):
        return draft
    return noise.pick(residual(p, q), position)


def rejection(
    target: TargetOutput,
    drafts: Sequence[int],
    proposed: Sequence[Chances],
    noise: Noise | None = None,
) -> Verdict:
    """Accept drafts by coins; `proposed` are the distributions they were sampled from, or
    empty if they were not sampled. Raises NotFiniteError.
    """
    sampling, tokens = target.sampling, list[int]()
    noise = Streams.of(sampling.seed, sampling.sample) if noise is None else noise
    not_sampled = [{draft: 1.0} for draft in drafts]
    for draft, q in zip(drafts, proposed or not_sampled, strict=True):
        position = len(target.tokens) + len(tokens)
        p = chances(scores(target.shape_logits(tokens), sampling))
        tokens.append(accept_or_replace(draft, p, q, noise, position))
        # A replacement that equals the draft counts as accepted.
        if tokens[-1] != draft:
            return Verdict(tuple(tokens), len(drafts))
    scored = scores(target.shape_logits(tokens), sampling)
    tokens.append(noise.pick(scored, len(target.tokens) + len(tokens)))
    return Verdict(tuple(tokens), len(drafts))
