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
BISECTION_STEPS = tl.constexpr(12)  # of a range, until a depth is close enough
MASS_MARGIN = tl.constexpr(0.999)  # of a mass: a margin for float32 sums
# Of a group's mass: a margin for that of its largest.
GROUP_MASS_MARGIN = tl.constexpr(2.0**-19)
DEPTH_MARGIN = tl.constexpr(1.001)  # of a depth
MAX_NORMAL_DEPTH = tl.constexpr(80.0)  # exp(-80) is still a normal float32
MIN_DEPTH_RANGE = tl.constexpr(1e-30)  # range of depths: avoids division by 0
# The margin of a sample: one row in a million may be missed. Besides these a few tokens
# of the sample at the edge, as a few deeper ones may be in it by chance.
DEVIATIONS = tl.constexpr(5.0)
EXTRA_SAMPLE_TOKENS = tl.constexpr(10.0)
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
    has_filters = (top_k > 0) | (top_p < 1) | (deepest < float("inf")) | (typical_p < 1)
    restricted = filtered & (greedy == 0) & has_filters
    temperature = tl.where(greedy, 1.0, temperature)
    return RowParams(temperature, top_k, top_p, deepest, typical_p, greedy, restricted)


@triton.jit
def only_typical_p(params):
    """Whether typical-p is a row's only filter."""
    other_filters = (
        (params.top_k > 0) | (params.top_p < 1) | (params.deepest < float("inf"))
    )
    return (params.typical_p < 1) & (other_filters == 0)


@triton.jit
def only_min_p(params):
    """Whether min-p is a row's only filter."""
    other_filters = (params.top_k > 0) | (params.top_p < 1) | (params.typical_p < 1)
    return (params.deepest < float("inf")) & (other_filters == 0)


@triton.jit
def depth_of(x, largest, temperature):
    """The depth of logits, never -0."""
    return tl.abs(tl.div_rn(largest - x.to(tl.float32), temperature))


@triton.jit
def mass_of(depth):
    """exp(-depth), as an integer."""
    return (tl.exp(-depth) * MASS_UNITS).to(tl.int64)


@triton.jit
def mass_without_largest(depth, mass):
    """An upper bound of the masses of groups without their largest token."""
    return tl.maximum(mass * (1 + GROUP_MASS_MARGIN) - tl.exp(-depth), 0.0)


@triton.jit
def max_kept_depth(params, depth, mass, total, group: tl.constexpr):
    """A depth that no kept token exceeds, from groups' least depths and their masses."""
    # For top-k, the depth is one of the groups' least depths.
    deepest = (
        tl.max(tl.where(depth < float("inf"), depth, 0.0), 0) * DEPTH_MARGIN
        + MIN_DEPTH_RANGE
    )
    start = tl.minimum(tl.where(params.top_k > 0, deepest, DEEPEST_BOUND), DEEPEST_BOUND)
    low = 0.0
    high = start
    share = tl.where(only_typical_p(params), params.typical_p, params.top_p)
    rest_mass = mass_without_largest(depth, mass)
    for _step in range(BISECTION_STEPS):
        limit = (low + high) / 2
        # The mass left beyond `limit`: all of a group, or all but its largest token,
        # where the others are at least as deep.
        is_within = depth <= limit
        beyond = tl.minimum(tl.where(is_within, rest_mass, mass), group * tl.exp(-limit))
        has_top_p = tl.sum(beyond, 0) < MASS_MARGIN * (1 - share) * total
        has_top_k = tl.sum(is_within.to(tl.int32), 0) >= params.top_k
        enough = tl.where(params.top_k > 0, has_top_k, has_top_p)
        low = tl.where(enough, low, limit)
        high = tl.where(enough, limit, high)
    # None found: no bound. What top-p keeps depends on the mass of all that min-p keeps.
    is_bounded = (high < start) & ((params.top_k > 0) | (params.deepest == float("inf")))
    return tl.minimum(tl.where(is_bounded, high, float("inf")), params.deepest)


@triton.jit
def max_tokens_within(depth, mass, limit, group: tl.constexpr):
    """An upper bound of the number of tokens within this depth: each of them has mass."""
    min_mass = tl.exp(-tl.minimum(limit, MAX_NORMAL_DEPTH))
    extra_tokens = tl.minimum(mass_without_largest(depth, mass) / min_mass, group - 1)
    return tl.sum(tl.where(depth <= limit, 1 + extra_tokens, 0.0), 0)


@triton.jit
def floor_of(largest, limit, temperature):
    """A lower bound of the logits of tokens within this depth, with all roundings."""
    return largest - limit * temperature * DEPTH_MARGIN


@triton.jit
def guess_bounds(params, line, largest, total, limit, vocab, samples: tl.constexpr):
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
    masked_mass = tl.sum(tl.where(depth > deepest, weight, 0.0), 0)
    target_mass = (1 - share) * (total - masked_mass) + masked_mass
    end = tl.max(tl.where(depth < float("inf"), depth, 0.0), 0)
    end = tl.minimum(end, limit)
    _, edge = _depth_range(depth, weight, target_mass, end)
    beyond = tl.where(depth > edge, weight, 0.0)
    beyond_sum = tl.sum(beyond, 0)
    variance = tl.sum(beyond * beyond, 0) - beyond_sum * beyond_sum / samples
    stray = tl.where(counted, 1.0, tl.exp(-edge)) * EXTRA_SAMPLE_TOKENS
    spread = tl.sqrt(tl.maximum(variance, 0.0)) * DEVIATIONS + stray
    low, _ = _depth_range(depth, weight, target_mass + spread, end)
    _, high = _depth_range(depth, weight, target_mass - spread, end)
    # All tokens up to the edge are listed if their number is needed, not only their mass.
    low = tl.where(counted, 0.0, low)
    mass_before = tl.maximum((total - target_mass - spread) * vocab / samples, 1.0)
    return low, tl.where(target_mass > spread, high, float("inf")), mass_before


@triton.jit
def _depth_range(depth, weight, target_mass, end):
    """A depth between two, beyond which the wanted mass is left."""
    low = 0.0
    high = end
    for _step in range(BISECTION_STEPS):
        middle = (low + high) / 2
        enough = tl.sum(tl.where(depth > middle, weight, 0.0), 0) <= target_mass
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return low, high


@triton.jit
def load_bounds(pointer):
    """Load a row's `DepthBounds`."""
    return DepthBounds(
        tl.load(pointer),
        tl.load(pointer + 1),
        tl.load(pointer + 2),
        tl.load(pointer + 3),
        tl.load(pointer + 4),
        tl.load(pointer + 5),
        tl.load(pointer + 6),
        tl.load(pointer + 7),
    )


@triton.jit
def store_bounds(pointer, bounds):
    """Store a row's bounds for `load_bounds`."""
    tl.store(pointer, bounds.largest)
    tl.store(pointer + 1, bounds.total)
    tl.store(pointer + 2, bounds.mean)
    tl.store(pointer + 3, bounds.limit)
    tl.store(pointer + 4, bounds.low)
    tl.store(pointer + 5, bounds.lowered)
    tl.store(pointer + 6, bounds.wait)
    tl.store(pointer + 7, bounds.floor)


@triton.jit
def is_whole(params, bounds):
    """Whether all tokens that may be kept are listed, not only those near the edge."""
    return (bounds.low == 0) & ((bounds.lowered == 0) | (params.top_k > 0))


@triton.jit
def target_of(share, total):
    """The least mass that the kept tokens must hold."""
    target = tl.ceil(share.to(tl.float64) * total).to(tl.int64)
    return tl.maximum(target, 1)
