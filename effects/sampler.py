"""The CPU's sampler: what `minfer.sample` says, over a batch.

Rows are worked on one after the other with numpy: one row's logits fit the cache of a core, and
numpy's argmax over a large vocabulary takes a thirtieth of torch's. A batch that is all greedy
never looks at noise; where top-k or top-p restrict a row, noise is made for what they keep.

All numbers are float32, but for the sums of top-p. The integers are those of `minfer.sample`
exactly; the logarithms may differ from correctly rounded ones in the last bits.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from minfer.request import SamplingParams
from minfer.sample import GOLDEN, LARGEST_V, MIX32, MIX64, is_greedy, stream

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint32]

_MIX32: Final = tuple((np.uint32(shift), np.uint32(factor)) for shift, factor in MIX32)
_MIX64: Final = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in MIX64)
_HALF: Final = np.float32(0.5)
_SCALE: Final = np.float32(2.0**-32)
_LARGEST_V: Final = np.float32(LARGEST_V)


@frozen
class Noisy:
    """How one row that is not greedy is sampled."""

    row: int  # in the batch
    temperature: np.float32
    top_k: int  # 0: no limit
    top_p: float  # 1: no limit


@frozen(eq=False)
class Sampling:
    """What sampling needs to know of the rows of a batch, the logits and positions apart."""

    noisy: tuple[Noisy, ...]
    streams: NDArray[np.uint64]  # [noisy]

    @classmethod
    def of(cls, rows: Sequence[tuple[SamplingParams, int, int]], vocab_size: int) -> "Sampling":
        """From each row's parameters, request seed and sample."""
        noisy, streams = [], []
        for i, (params, seed, sample) in enumerate(rows):
            if not is_greedy(params):
                top_k = params.top_k if 0 < params.top_k < vocab_size else 0
                top_p = float(np.float32(params.top_p))
                noisy.append(Noisy(i, np.float32(params.temperature), top_k, top_p))
                streams.append(stream(seed, sample))
        return cls(tuple(noisy), np.array(streams, np.uint64))


@frozen(eq=False)
class Choice:
    """The tokens drawn."""

    tokens: Ints  # [rows]
    broken: tuple[int, ...]  # rows whose logits are not finite: their tokens mean nothing


def choose(logits: Tensor, sampling: Sampling, positions: Ints) -> Choice:
    """Draw a token per row from `logits` [rows, vocab], of any float type.

    `positions` [rows] are the indices of the tokens drawn, in prompt and output together.
    """
    values: Floats = logits.float().numpy()
    tokens: Ints = values.argmax(-1)  # the first of equals; a NaN counts as the largest
    rows = np.arange(len(tokens))
    largest = values[rows, tokens]
    finite = np.isfinite(largest)
    broken = () if finite.all() else tuple(np.flatnonzero(~finite).tolist())
    if sampling.noisy:
        index = [one.row for one in sampling.noisy]
        keys = draw_keys(sampling.streams, positions[index])
        with np.errstate(over="ignore", invalid="ignore"):  # of broken rows
            for one, key in zip(sampling.noisy, keys.tolist(), strict=True):
                if finite[one.row]:
                    tokens[one.row] = _draw(values[one.row], largest[one.row], one, key)
    return Choice(tokens, broken)


def _draw(logits: Floats, largest: np.float32, how: Noisy, key: int) -> int:
    scaled = logits - largest
    scaled /= how.temperature
    if how.top_k or how.top_p < 1:
        ids = kept(scaled, how.top_k, how.top_p)
        scaled = scaled[ids]
        scaled += gumbels(key, ids.astype(np.uint32))
        return int(ids[scaled.argmax()])
    scaled += gumbels(key, np.arange(len(scaled), dtype=np.uint32))
    return int(scaled.argmax())


def kept(scaled: Floats, top_k: int, top_p: float) -> Ints:
    """Ids that top-k and then top-p leave, rising; the largest of `scaled` [vocab] must be 0.

    Sorts only what can be in the shortest prefix that holds `top_p`: tokens below the share
    (1 - top_p) / vocab hold less than 1 - top_p together, so none of them is needed.
    """
    if top_k:
        place = len(scaled) - top_k
        ids = np.flatnonzero(scaled >= np.partition(scaled, place)[place])
        if top_p >= 1:
            return ids
        total = np.exp(scaled[ids]).sum(dtype=np.float64)
    else:
        shares = np.exp(scaled)
        total = shares.sum(dtype=np.float64)
        ids = np.flatnonzero(shares >= 0.5 * (1 - top_p) * total / len(shares))
    values = scaled[ids]
    falling = np.sort(values)[::-1]
    held = np.cumsum(np.exp(falling), dtype=np.float64)
    count = min(int(held.searchsorted(top_p * total)) + 1, len(ids))
    edge = falling[count - 1]
    keep = values > edge
    # A stable sort would give lower ids first among equals; it takes five times as long.
    keep[np.flatnonzero(values == edge)[: count - int(keep.sum())]] = True
    left: Ints = ids[keep]
    return left


def draw_keys(streams: NDArray[np.uint64], positions: Ints) -> NDArray[np.uint64]:
    """`minfer.sample.draw_key`, elementwise."""
    x: NDArray[np.uint64] = streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(
        GOLDEN
    )
    for shift, factor in _MIX64:
        x = (x ^ (x >> shift)) * factor
    return x


def noise_bits(key: int, ids: Bits) -> Bits:
    """`minfer.sample.noise_bits` of many token ids under one key."""
    x = ids + np.uint32(key & 0xFFFFFFFF)
    spare = np.empty_like(x)
    for i, (shift, factor) in enumerate(_MIX32):
        np.right_shift(x, shift, out=spare)
        x ^= spare
        if factor != 1:
            x *= factor
        if i == 0:
            x ^= np.uint32(key >> 32)
    return x


def gumbels(key: int, ids: Bits) -> NDArray[Any]:
    """`minfer.sample.gumbel` of each id's bits: [ids] float32."""
    v = noise_bits(key, ids).astype(np.float32)
    v += _HALF
    v *= _SCALE
    np.minimum(v, _LARGEST_V, out=v)
    np.negative(v, out=v)
    np.log1p(v, out=v)
    np.negative(v, out=v)
    np.log(v, out=v)
    return np.negative(v, out=v)
