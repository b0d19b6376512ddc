"""The CPU's sampler: the sampling of `minfer.sampling.reference_sampler`, over a batch.

Rows are sampled one after the other with numpy: one row's logits fit the cache of a core,
and numpy's argmax over a large vocabulary takes a thirtieth of torch's time. An
all-greedy batch computes no noise; where filters restrict a row, noise is computed for
the remaining tokens only. All numbers are float32, but for the sums of top-p. Integers
are exactly those of `minfer.sampling.reference_sampler`; logarithms may differ in the
last bits.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.sampling.reference_sampler import (
    GOLDEN,
    LARGEST_V,
    MIX32,
    MIX64,
    RowSampling,
    is_greedy,
    lowest,
    stream,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint32]
Keys = NDArray[np.uint64]
_MIX32: Final = tuple((np.uint32(shift), np.uint32(factor)) for shift, factor in MIX32)


@frozen(eq=False)
class NoisyRowParams:
    """Sampling parameters of one row that is not greedy, without its noise."""

    temperature: np.float32
    top_k: int  # 0: all
    top_p: float  # 1: all
    # min-p's lower bound, as `minfer.sampling.reference_sampler.lowest` returns it; -inf:
    # all
    lowest: float
    typical_p: float  # 1: all

    @property
    def keeps_all(self) -> bool:
        """Whether no token is filtered out."""
        likeliest = self.top_k or self.top_p < 1 or self.lowest > -np.inf
        return not likeliest and self.typical_p >= 1


@frozen(eq=False)
class Sampling:
    """Sampling parameters of the rows of a batch that are not greedy."""

    rows: tuple[int, ...]  # their indices in the batch
    params: tuple[NoisyRowParams, ...]
    streams: Keys  # [noisy rows]

    @classmethod
    def of(cls, rows: Sequence[RowSampling], vocab_size: int) -> "Sampling":
        """Build from each row's sampling values."""
        noisy = {i: row for i, row in enumerate(rows) if not is_greedy(row)}
        params = [
            NoisyRowParams(
                temperature=np.float32(row.temperature),
                top_k=row.top_k if 0 < row.top_k < vocab_size else 0,
                top_p=float(np.float32(row.top_p)),
                lowest=lowest(row.min_p),
                typical_p=float(np.float32(row.typical_p)),
            )
            for row in noisy.values()
        ]
        streams = np.array(
            [stream(row.seed, row.sample) for row in noisy.values()], np.uint64
        )
        return cls(tuple(noisy), tuple(params), streams)


@frozen(eq=False)
class SampledTokens:
    """The sampled tokens."""

    tokens: Ints  # [rows]
    # rows whose logits are not finite: their tokens are meaningless
    broken: tuple[int, ...]


def choose(logits: Tensor, sampling: Sampling, positions: Ints) -> SampledTokens:
    """Sample a token from each row of `logits` [rows, vocab], at `positions` [rows] of
    sequences.
    """
    values: Floats = logits.float().numpy()
    tokens: Ints = values.argmax(-1)  # the first of equals; a NaN counts as the largest
    largest = values[np.arange(len(tokens)), tokens]
    finite = np.isfinite(largest)
    broken = () if finite.all() else tuple(np.flatnonzero(~finite).tolist())
    if sampling.rows:
        keys = draw_keys(sampling.streams, positions[list(sampling.rows)]).tolist()
        with np.errstate(over="ignore", invalid="ignore"):  # of broken rows
            for row, params, key in zip(
                sampling.rows, sampling.params, keys, strict=True
            ):
                if finite[row]:
                    tokens[row] = _draw(values[row], largest[row], params, key)
    return SampledTokens(tokens, broken)


def _draw(logits: Floats, largest: np.float32, params: NoisyRowParams, key: int) -> int:
    scaled = logits - largest
    scaled /= params.temperature
    if params.keeps_all:
        scaled += gumbels(key, np.arange(len(scaled), dtype=np.uint32))
        return int(scaled.argmax())
    ids = kept_ids(scaled, params.top_k, params.top_p, params.lowest)
    if params.typical_p < 1:
        ids = typical_ids(scaled, ids, params.typical_p)
    scaled = scaled[ids] + gumbels(key, ids.astype(np.uint32))
    return int(ids[scaled.argmax()])


def kept_ids(scaled: Floats, top_k: int, top_p: float, lowest_kept: float) -> Ints:
    """Returns the ids of at least `lowest_kept` that top-k and then top-p keep,
    ascending; the largest of `scaled` is 0.

    Sorts only tokens that can be in the shortest prefix that holds `top_p`: tokens below
    the share (1 - top_p) / vocab hold less than 1 - top_p together, so none of them is
    needed.
    """
    if not top_k and top_p >= 1 and lowest_kept == -np.inf:
        return np.arange(len(scaled))
    if top_k or lowest_kept > -np.inf:
        place = len(scaled) - top_k
        threshold = (
            max(lowest_kept, np.partition(scaled, place)[place]) if top_k else lowest_kept
        )
        ids = np.flatnonzero(scaled >= threshold)
        if top_p >= 1:
            return ids
        total = np.exp(scaled[ids]).sum(dtype=np.float64)
    else:
        shares = np.exp(scaled)
        total = shares.sum(dtype=np.float64)
        ids = np.flatnonzero(shares >= 0.5 * (1 - top_p) * total / len(shares))
    values = scaled[ids]
    descending = np.sort(values)[::-1]
    cumulative = np.cumsum(np.exp(descending), dtype=np.float64)
    count = min(int(cumulative.searchsorted(top_p * total)) + 1, len(ids))
    threshold = descending[count - 1]
    keep = values > threshold
    # A stable sort would give lower ids first among equals; it takes five times as long.
    keep[np.flatnonzero(values == threshold)[: count - int(keep.sum())]] = True
    remaining: Ints = ids[keep]
    return remaining


def typical_ids(scaled: Floats, ids: Ints, typical_p: float) -> Ints:
    """Returns those of the ascending `ids` that typical-p keeps, ascending; the largest
    of `scaled` is 0.
    """
    depth = -scaled[ids]
    shares = np.exp(-depth.astype(np.float64))
    positive = shares > 0  # without any, depth may be infinite
    total = shares.sum()
    mean = np.float32((shares[positive] * depth[positive]).sum() / total)
    order = np.abs(depth - mean).argsort(kind="stable")
    cumulative = np.cumsum(shares[order])
    remaining: Ints = np.sort(
        ids[order[: int(cumulative.searchsorted(typical_p * total)) + 1]]
    )
    return remaining


def draw_keys(streams: Keys, positions: Ints) -> Keys:
    """`minfer.sampling.reference_sampler.draw_key`, elementwise."""
    x: Keys = streams + (positions + 1).astype(np.uint64) * np.uint64(GOLDEN)
    for shift, factor in MIX64:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


def noise_bits(key: int, ids: Bits) -> Bits:
    """`minfer.sampling.reference_sampler.noise_bits` of many token ids under one key."""
    x = ids + np.uint32(key & 0xFFFFFFFF)
    for i, (shift, factor) in enumerate(_MIX32):
        x ^= x >> shift
        if factor != 1:
            x *= factor
        if i == 0:
            x ^= np.uint32(key >> 32)
    return x


def gumbels(key: int, ids: Bits) -> Floats:
    """`minfer.sampling.reference_sampler.gumbel` of each id's bits: [ids] float32."""
    v = noise_bits(key, ids).astype(np.float32)
    v += 0.5
    v *= 2.0**-32
    np.minimum(v, LARGEST_V, out=v)
    for turn in (np.log1p, np.log):
        np.negative(v, out=v)
        turn(v, out=v)
    return np.negative(v, out=v)
