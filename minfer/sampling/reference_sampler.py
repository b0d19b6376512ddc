"""Sampling on plain values: the reference for every sampler on a device.

Theory. The token at a position is

    argmax over the kept tokens t of   logit[t] / temperature + gumbel(t)

which is an exact draw from the softmax over them (Gumbel-max; Maddison et al. 2014). The
noise is a function of (request seed, sample, position, token id) and of nothing else: no
draw depends on other requests, chunks or preemption; and a draft is right if and only if
it equals the draw at its position, so speculation is exact for sampling as for greedy
decoding.

The changes of logits before that (penalties, biases, hidden tokens) are in
`minfer.sampling.logits`.

Kept tokens are vLLM's: first min-p, every token with at least `min_p` of the likeliest
one's probability, and top-k, every token whose logit is at least the k-th largest (ties
at the edge are all kept); then top-p on what both leave, renormalised: in order of
falling logit, lower ids first among equals, the shortest prefix that holds at least
`top_p` of the probability. Last comes locally typical sampling (Meister et al. 2022) on
what these leave, renormalised: with depth = -logit / temperature, which is -log p but for
a constant, and its expectation in place of the entropy, in order of rising |depth -
E[depth]|, lower ids first among equals, the shortest prefix that holds at least
`typical_p`. A temperature below 1e-5 is greedy: no noise, no filter. The lowest id wins
all ties.

The noise costs a few 32-bit operations per token: a GPU kernel recomputes rather than
stores it:

    stream = f(seed, sample)                64 bits, once per sample of a request
    key    = splitmix64(stream, position)   64 bits, once per token drawn   (Steele et al.
           2014)
    bits   = hash32(key, token id)          32 bits, once per candidate, three
           multiplications
    v      = (bits + 1/2) / 2^32            in (0, 1)
    noise  = -log(-log(1 - v))

v rather than u = 1 - v keeps full precision where it counts, in the upper tail of the
noise: small v are exact in float32 down to 2^-33, whereas u near 1 has steps of 2^-24.
hash32 is Wellons' triple32 (the least biased known of its kind); the high half of the key
enters after the first multiplication, or streams whose low halves are close would be
shifted copies of each other.

Arithmetic is in float32 with every operation rounded, as on a device; the logarithms here
are correctly rounded, a device's may differ in the last bit, which decides a draw once in
millions.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from attrs import frozen

from minfer.sampling.logits import Shaping, f32, shape_logits
from minfer.sampling.params import RowValues, SamplingParams, row_values

# temperatures; vLLM's limit, as logits / 1e-6 lose their differences
GREEDY_BELOW: Final = 1e-5
GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: splitmix64's stride
MIX64: Final = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
    (31, 1),
)  # shift, factor
MIX32: Final = (
    (17, 0xED5AD4BB),
    (11, 0xAC4C1B51),
    (15, 0x31848BAB),
    (14, 1),
)  # shift, factor
LARGEST_V: Final = 1 - 2**-24  # the largest float32 below 1

_M32: Final = 2**32 - 1
_M64: Final = 2**64 - 1


class NotFiniteError(ValueError):
    """Logits hold NaN or +inf, or only -inf: there is no distribution to sample from."""


@frozen(kw_only=True)
class RowSampling(Shaping):
    """The sampling values of one device row: of one sample of a request."""

    seed: int
    sample: int
    # Log-probabilities of the prompt's tokens, and of this many likeliest; None: none.
    prompt_logprobs: int | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        seed: int,
        sample: int,
        stop_ids: frozenset[int] = frozenset(),
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> "RowSampling":
        """The values from a user's parameters, with bad words as token ids."""
        return cls(
            seed=seed,
            sample=sample,
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=bad_words,
            **row_values(params),
        )


def stream(seed: int, sample: int) -> int:
    """64 bits that identify one sample of a request; `seed` counts modulo 2^64."""
    return _mix64(_mix64(seed + GOLDEN) + sample * GOLDEN)


def draw_key(stream_: int, position: int) -> int:
    """64 bits for the token at index `position` of prompt and output together."""
    return _mix64(stream_ + (position + 1) * GOLDEN)


def _mix64(x: int) -> int:
    x &= _M64
    for shift, factor in MIX64:
        x = (x ^ x >> shift) * factor & _M64
    return x


def noise_bits(key: int, token: int) -> int:
    """32 bits for one token id; a bijection of the ids for each key."""
    x = (token + key) & _M32
    for i, (shift, factor) in enumerate(MIX32):
        x = (x ^ x >> shift) * factor & _M32
        if i == 0:
            x ^= key >> 32 & _M32
    return x


def uniform(bits: int) -> float:
    """A number between 0 and 1, neither included, from 32 random bits."""
    return min(f32(f32(bits) + 0.5) * 2.0**-32, LARGEST_V)


def gumbel(bits: int) -> float:
    """Standard Gumbel noise from 32 random bits; from -2.82 to 22.88."""
    return -f32(math.log(-f32(math.log1p(-uniform(bits)))))


def is_greedy(params: RowValues) -> bool:
    """Whether the token with the largest logit is taken."""
    return params.temperature < GREEDY_BELOW


def lowest(min_p: float) -> float:
    """The lowest logit that min-p keeps, over temperature and minus the largest; -inf
    keeps all.
    """
    share = f32(min_p)
    return f32(math.log(share)) if share > 0 else -math.inf


def filter_tokens(
    scaled: Sequence[float],
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> list[int]:
    """The ids that min-p, top-k, top-p and then typical-p keep, rising; `scaled` are
    logits over temperature.
    """
    largest, descending = max(scaled), sorted(scaled, reverse=True)
    threshold = max(
        largest + lowest(min_p),
        descending[top_k - 1] if 0 < top_k < len(scaled) else -math.inf,
    )
    ids = [t for t in range(len(scaled)) if scaled[t] >= threshold]
    if top_p < 1:
        ids.sort(key=lambda t: -scaled[t])  # stable: lower ids first among equals
        ids = sorted(_prefix(scaled, ids, top_p))
    if typical_p < 1:
        deviations = _deviations(scaled, ids)
        ids.sort(key=lambda t: deviations[t])
        ids = sorted(_prefix(scaled, ids, typical_p))
    return ids


def _prefix(scaled: Sequence[float], ids: list[int], share: float) -> list[int]:
    """The first of `ids` that hold at least this share of all their probability."""
    largest = max(scaled)
    shares = [math.exp(scaled[t] - largest) for t in ids]
    return ids[
        : bisect_left(list(accumulate(shares)), f32(share) * math.fsum(shares)) + 1
    ]


def _deviations(scaled: Sequence[float], ids: list[int]) -> dict[int, float]:
    """How far the surprise at each id is from its expectation over all of them."""
    largest = max(scaled)
    depth = {t: f32(largest - scaled[t]) for t in ids}
    shares = {t: math.exp(-depth[t]) for t in ids if depth[t] < math.inf}
    total = math.fsum(shares.values())
    mean = f32(math.fsum(share * depth[t] for t, share in shares.items()) / total)
    return {t: f32(abs(depth[t] - mean)) for t in ids}


def draw(
    logits: Sequence[float], params: RowValues, seed: int, sample: int, position: int
) -> int:
    """The token at index `position` of a sequence, sampled from raw logits [vocab].
    Raises NotFiniteError.
    """
    return pick(scores(logits, params), stream(seed, sample), position)


def scores(logits: Sequence[float], params: RowValues) -> dict[int, float]:
    """The tokens that may be sampled, rising, with their logits over temperature minus
    the largest. Raises NotFiniteError.
    """
    largest = max(logits)
    if any(map(math.isnan, logits)) or not math.isfinite(largest):
        raise NotFiniteError("the logits are not finite")
    if is_greedy(params):
        return {list(logits).index(largest): 0.0}
    temperature = f32(params.temperature)
    scaled = [f32((logit - largest) / temperature) for logit in map(f32, logits)]
    ids = filter_tokens(
        scaled, params.top_k, params.top_p, params.min_p, params.typical_p
    )
    return {t: scaled[t] for t in ids}


def pick(scored: Mapping[int, float], stream_: int, position: int) -> int:
    """One of the scored tokens, by a stream's noise for a position: each with a
    probability that is proportional to exp(score). The first of equals wins.
    """
    key = draw_key(stream_, position)
    noisy = {t: f32(score + gumbel(noise_bits(key, t))) for t, score in scored.items()}
    return max(noisy, key=noisy.__getitem__)


def next_token(
    logits: Sequence[float],
    sampling: RowSampling,
    tokens: Sequence[int],
    num_prompt_tokens: int,
) -> int:
    """The token after `tokens`, the first `num_prompt_tokens` of which are the prompt,
    from the model's logits [vocab]. Raises NotFiniteError.
    """
    prompt, output = tokens[:num_prompt_tokens], tokens[num_prompt_tokens:]
    values = shape_logits(logits, sampling, prompt, output)
    return draw(values, sampling, sampling.seed, sampling.sample, len(tokens))
