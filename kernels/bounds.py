"""Bounds of the depth of a row's tokens, proven or guessed, so that few tokens must be
sorted, for the kernels of sample_kernels.py; sample.py has their theory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)  # a temperature
# Masses are summed as integers, so that their order does not matter: in units of 2^-43,
# as 2^20 of at most 1 then fit in 63 bits.
MASS_UNITS = tl.constexpr(2.0**43)
DEEPEST_BOUND = tl.constexpr(128.0)  # exp(-128) is 0 in float32
HALVINGS = tl.constexpr(12)  # of a range, until a depth is close enough
NEARLY = tl.constexpr(0.999)  # of a mass: a margin for float32 sums
ROUNDED = tl.constexpr(2.0**-19)  # of a group's mass: a margin for that of its largest
MORE = tl.constexpr(1.001)  # of a depth
DEEP = tl.constexpr(80.0)  # exp(-80) is still a normal float32
NARROWEST = tl.constexpr(1e-30)  # range of depths: avoids division by 0
# The margin of a sample: one row in a million may be missed. Besides these a few tokens
# of the sample at the edge, as a few deeper ones may be in it by chance.
DEVIATIONS = tl.constexpr(5.0)
STRAYS = tl.constexpr(10.0)
# The layout of a row's `DepthBounds` in memory.
BOUND_WORDS = tl.constexpr(8)
# The sums of a row: the mass of surely kept tokens, and that of all within min-p.
MASSES = tl.constexpr(2)


class RowParams(NamedTuple):
    """The sampling values of a row."""

    temperature: tl.tensor  # 1 if greedy
    top_k: tl.tensor  # 0: all
    top_p: tl.tensor
    deepest: tl.tensor  # the maximal depth of a token, from min-p
    typical_p: tl.tensor
    greedy: tl.tensor
    restricted: tl.tensor


class DepthBounds(NamedTuple):
    """The bounds of a filtered row before its tokens are listed."""

    largest: tl.tensor  # logit
    total: tl.tensor  # mass of all tokens
    mean: tl.tensor  # depth; only if typical-p alone filters the row
    limit: tl.tensor  # no kept token is deeper
    low: tl.tensor  # all less deep tokens are kept, and few of them listed
    lowered: tl.tensor  # 1: `limit` is a guess
    # times its mass: a surely kept token is listed if its waiting time is less
    wait: tl.tensor
    floor: tl.tensor  # logit: no lower one is needed; NaN for rows that are not filtered


@triton.jit
def row_params(
    rows,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    row,
    vocab,
    filtered: tl.constexpr,
):
    """The sampling values of a row; `filtered` False promises that no row is filtered."""
    owner = tl.load(rows + row)
    temperature = tl.load(temperatures + owner)
    top_k = tl.load(top_ks + owner)
    top_p = tl.load(top_ps + owner)
    greedy = temperature < GREEDY_BELOW
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    deepest = tl.load(deepests + owner)
    typical_p = tl.load(typical_ps + owner)
    some = (top_k > 0) | (top_p < 1) | (deepest < float("inf")) | (typical_p < 1)
    restricted = filtered & (greedy == 0) & some
    temperature = tl.where(greedy, 1.0, temperature)
    return RowParams(temperature, top_k, top_p, deepest, typical_p, greedy, restricted)


@triton.jit
def only_typical_p(params):
    """Whether typical-p is a row's only filter."""
    others = (params.top_k > 0) | (params.top_p < 1) | (params.deepest < float("inf"))
    return (params.typical_p < 1) & (others == 0)


@triton.jit
def only_min_p(params):
    """Whether min-p is a row's only filter."""
    others = (params.top_k > 0) | (params.top_p < 1) | (params.typical_p < 1)
    return (params.deepest < float("inf")) & (others == 0)


@triton.jit
def depth_of(x, largest, temperature):
    """The depth of logits, never -0."""
    return tl.abs(tl.div_rn(largest - x.to(tl.float32), temperature))


@triton.jit
def mass_of(depth):
    """exp(-depth), as an integer."""
    return (tl.exp(-depth) * MASS_UNITS).to(tl.int64)


@triton.jit
def rest_of(depth, mass):
    """An upper bound of the masses of groups without their largest token."""
    return tl.maximum(mass * (1 + ROUNDED) - tl.exp(-depth), 0.0)


@triton.jit
def limit_of(params, depth, mass, total, group: tl.constexpr):
    """A depth that no kept token exceeds, from groups' least depths and their masses."""
    # For top-k, the depth is one of the groups' least depths.
    deepest = tl.max(tl.where(depth < float("inf"), depth, 0.0), 0) * MORE + NARROWEST
    start = tl.minimum(tl.where(params.top_k > 0, deepest, DEEPEST_BOUND), DEEPEST_BOUND)
    less = 0.0
    more = start
    share = tl.where(only_typical_p(params), params.typical_p, params.top_p)
    rest = rest_of(depth, mass)
    for _step in range(HALVINGS):
        limit = (less + more) / 2
        # The mass left beyond `limit`: all of a group, or all but its largest token,
        # where the others are at least as deep.
        near = depth <= limit
        beyond = tl.minimum(tl.where(near, rest, mass), group * tl.exp(-limit))
        light = tl.sum(beyond, 0) < NEARLY * (1 - share) * total
        many = tl.sum(near.to(tl.int32), 0) >= params.top_k
        enough = tl.where(params.top_k > 0, many, light)
        less = tl.where(enough, less, limit)
        more = tl.where(enough, limit, more)
    # None found: no bound. What top-p keeps depends on the mass of all that min-p keeps.
    found = (more < start) & ((params.top_k > 0) | (params.deepest == float("inf")))
    return tl.minimum(tl.where(found, more, float("inf")), params.deepest)


@triton.jit
def most_within(depth, mass, limit, group: tl.constexpr):
    """An upper bound of the number of tokens within this depth: each of them has mass."""
    least = tl.exp(-tl.minimum(limit, DEEP))
    more = tl.minimum(rest_of(depth, mass) / least, group - 1)
    return tl.sum(tl.where(depth <= limit, 1 + more, 0.0), 0)


@triton.jit
def floor_of(largest, limit, temperature):
    """A lower bound of the logits of tokens within this depth, with all roundings."""
    return largest - limit * temperature * MORE


@triton.jit
def guess_of(params, line, largest, total, limit, vocab, samples: tl.constexpr):
    """Two depths between which the edge should be, and the mass before them.

    A sample of logits estimates the mass beyond a depth; the range should hold few
    tokens. A wrong guess only costs time.
    """
    ids = (tl.arange(0, samples).to(tl.int64) * vocab // samples).to(tl.int32)
    depth = depth_of(tl.load(line + ids), largest, params.temperature)
    counted = params.top_k > 0
    weight = tl.where(counted, 1.0, tl.exp(-depth))
    total = tl.where(counted, samples, total * samples / vocab)
    share = tl.where(counted, params.top_k / vocab, params.top_p)
    deepest = tl.where(counted, float("inf"), params.deepest)
    out = tl.sum(tl.where(depth > deepest, weight, 0.0), 0)
    wanted = (1 - share) * (total - out) + out
    end = tl.max(tl.where(depth < float("inf"), depth, 0.0), 0)
    end = tl.minimum(end, limit)
    _, edge = _leaving(depth, weight, wanted, end)
    beyond = tl.where(depth > edge, weight, 0.0)
    sum_ = tl.sum(beyond, 0)
    variance = tl.sum(beyond * beyond, 0) - sum_ * sum_ / samples
    stray = tl.where(counted, 1.0, tl.exp(-edge)) * STRAYS
    spread = tl.sqrt(tl.maximum(variance, 0.0)) * DEVIATIONS + stray
    low, _ = _leaving(depth, weight, wanted + spread, end)
    _, high = _leaving(depth, weight, wanted - spread, end)
    # All tokens up to the edge are listed if their number is needed, not only their mass.
    low = tl.where(counted, 0.0, low)
    held = tl.maximum((total - wanted - spread) * vocab / samples, 1.0)
    return low, tl.where(wanted > spread, high, float("inf")), held


@triton.jit
def _leaving(depth, weight, wanted, end):
    """A depth between two, beyond which the wanted mass is left."""
    less = 0.0
    more = end
    for _step in range(HALVINGS):
        middle = (less + more) / 2
        enough = tl.sum(tl.where(depth > middle, weight, 0.0), 0) <= wanted
        less = tl.where(enough, less, middle)
        more = tl.where(enough, middle, more)
    return less, more


@triton.jit
def load_bounds(at):
    """Load a row's `DepthBounds`."""
    return DepthBounds(
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
        tl.load(at + 5),
        tl.load(at + 6),
        tl.load(at + 7),
    )


@triton.jit
def store_bounds(at, bounds):
    """Store a row's bounds for `load_bounds`."""
    tl.store(at, bounds.largest)
    tl.store(at + 1, bounds.total)
    tl.store(at + 2, bounds.mean)
    tl.store(at + 3, bounds.limit)
    tl.store(at + 4, bounds.low)
    tl.store(at + 5, bounds.lowered)
    tl.store(at + 6, bounds.wait)
    tl.store(at + 7, bounds.floor)


@triton.jit
def is_whole(params, bounds):
    """Whether all tokens that may be kept are listed, not only those near the edge."""
    return (bounds.low == 0) & ((bounds.lowered == 0) | (params.top_k > 0))


@triton.jit
def target_of(share, total):
    """The least mass that the kept tokens must hold."""
    target = tl.ceil(share.to(tl.float64) * total).to(tl.int64)
    return tl.maximum(target, 1)
