"""The edges of a row's filters, found without a sort: weighted quantiles, for the kernels
of sample_kernels.py; sample.py has their theory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.bounds import (
    MASS_UNITS,
    MIN_DEPTH_RANGE,
    DepthBounds,
    depth_of,
    is_whole,
    mass_of,
    only_typical_p,
    target_of,
)

INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32's, the largest depth
BITS_A_PASS = tl.constexpr(4)  # of a key that `_quantile` searches
DIGITS = tl.constexpr(16)  # values of these bits
BINS = tl.constexpr(16)  # of a range of depths, of which `_select_bin` takes one
# Tiles of a pass over a long list, which waits for memory less often.
LONG_LIST_TILES = tl.constexpr(4)
# The kinds of `_quantile`: a depth by tokens, a depth by mass, an id at a depth.
BY_TOKENS = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
BY_ID = tl.constexpr(2)
BY_DEVIATION = tl.constexpr(3)  # a distance from the mean depth, by mass
BY_TYPICAL_ID = tl.constexpr(4)  # an id at that distance, by mass


class CandidateList(NamedTuple):
    """A row's list of the ids that may be kept, and the values from which depths are
    computed.

    All tokens less deep than `bounds.low` are kept, and not all of them are listed.
    """

    logits: tl.tensor  # pointer to the row's
    ids: tl.tensor  # pointer to the list
    size: tl.tensor  # of the list
    has_all: tl.tensor  # 1: all ids count, and there is no list
    bounds: DepthBounds
    temperature: tl.tensor


class Edges(NamedTuple):
    """The kept tokens: depths, and distances from the mean depth, up to an edge; and of
    those exactly at the edge the ids up to the last.
    """

    depth: tl.tensor
    last: tl.tensor
    mean: tl.tensor
    distance: tl.tensor
    last_typical: tl.tensor


@triton.jit
def load_candidates(candidates, start, tile: tl.constexpr):
    """Ids of a row's list, their mask, and their depth, which is never -0."""
    mask = start + tl.arange(0, tile) < candidates.size
    ids = start + tl.arange(0, tile)
    length = tl.where(candidates.has_all > 0, 0, candidates.size)
    ids = tl.load(candidates.ids + ids, mask=ids < length, other=ids)
    x = tl.load(candidates.logits + ids, mask=mask, other=float("-inf"))
    return ids, mask, depth_of(x, candidates.bounds.largest, candidates.temperature)


@triton.jit
def all_candidates(candidates, vocab):
    """All ids instead of a list."""
    none = tl.full([], 0.0, tl.float32)
    row_bounds = candidates.bounds
    infinite = none + float("inf")
    bounds = DepthBounds(
        row_bounds.largest,
        row_bounds.total,
        row_bounds.mean,
        infinite,
        none,
        none,
        none,
        none,
    )
    true = tl.full([], 1, tl.int32)
    return CandidateList(
        candidates.logits, candidates.ids, vocab, true, bounds, candidates.temperature
    )


@triton.jit
def _mass(depth, edge):
    return tl.where(depth <= edge, mass_of(depth), 0)


@triton.jit
def is_kept(edges, ids, mask, depth):
    """Which tokens are kept by their depths."""
    at_edge = (depth == edges.depth) & (ids.to(tl.uint32) <= edges.last)
    return mask & ((depth < edges.depth) | at_edge)


@triton.jit
def _quantile(candidates, edges, target, kind: tl.constexpr, tile: tl.constexpr):
    """The least key up to which tokens weigh `target` > 0, and the weight before it.

    A key is the bits of a depth or of a distance from the mean depth, or an id at the
    edge of these; a weight is 1 or a mass. It is found from its highest bits on: a pass
    sums the weights below each of 16 choices.
    """
    base = tl.full([], 0, tl.uint32)
    before = tl.full([], 0, tl.int64)
    first = tl.full([], 0, tl.int32)
    if (kind == BY_ID) + (kind == BY_TYPICAL_ID):
        first += 3  # ids have 20 bits
    if kind == BY_MASS:
        base, first = _common_prefix(candidates.bounds)
    for level in range(first, 8):
        steps = (tl.arange(0, DIGITS) << (28 - BITS_A_PASS * level)).to(tl.uint32)
        sums = tl.zeros([DIGITS], tl.int64)
        if (kind == BY_TOKENS) + (kind == BY_ID):  # weights are 1
            sums = tl.zeros([DIGITS], tl.int32)
        for start in range(0, candidates.size, tile):
            ids, mask, depth = load_candidates(candidates, start, tile)
            key = depth.to(tl.uint32, bitcast=True)
            weight = mask.to(sums.dtype)
            if kind == BY_MASS:  # of depths up to the edge
                weight = _mass(depth, edges.depth)
                weight = tl.where(depth < candidates.bounds.low, 0, weight)
            if kind == BY_ID:
                key = ids.to(tl.uint32)
                weight = (mask & (depth == edges.depth)).to(sums.dtype)
            if kind >= BY_DEVIATION:  # and of ids that are typical
                distance = tl.abs(depth - edges.mean)
                key = distance.to(tl.uint32, bitcast=True)
                is_left = is_kept(edges, ids, mask, depth)
                if kind == BY_TYPICAL_ID:
                    key = ids.to(tl.uint32)
                    is_left &= distance == edges.distance
                weight = tl.where(is_left, _mass(depth, edges.depth), 0)
            below = key[None, :] < (base + steps)[:, None]
            sums += tl.sum(tl.where(below, weight[None, :], 0), 1)
        base += tl.max(tl.where(sums < target, steps, 0), 0)
        before = tl.max(tl.where(sums < target, sums, 0), 0).to(tl.int64)
    return base, before


@triton.jit
def _common_prefix(bounds):
    """The highest bits that all depths between two have in common, and how many groups of
    four.
    """
    low = bounds.low.to(tl.uint32, bitcast=True)
    differ = low ^ bounds.limit.to(tl.uint32, bitcast=True)
    shifts = 28 - tl.arange(0, 8) * BITS_A_PASS
    count = tl.sum(((differ >> shifts.to(tl.uint32)) == 0).to(tl.int32), 0)
    low_bits = (tl.full([], 1, tl.int64) << (32 - count * BITS_A_PASS).to(tl.int64)) - 1
    return (low.to(tl.int64) & ~low_bits).to(tl.uint32), count


@triton.jit
def find_edges(
    params, candidates, sure_mass, min_p_mass, vocab, list_capacity, tile: tl.constexpr
):
    """The depth up to which tokens are kept, and the last id exactly at it; and the
    candidates: the given list, or all ids if its bound was too low.

    `sure_mass` is the mass of surely kept tokens, `min_p_mass` that of all that min-p
    keeps. Both are read only if the list does not have all candidates.
    """
    max_id = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, max_id, infinite, infinite, max_id)
    if params.top_k > 0:
        if (candidates.bounds.lowered > 0) & (candidates.size < params.top_k):
            candidates = all_candidates(candidates, vocab)
        key, _ = _quantile(candidates, edges, params.top_k, BY_TOKENS, tile)
        # If there are fewer than k tokens, all are kept.
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        edges = Edges(edge, max_id, infinite, infinite, max_id)
    edge = tl.minimum(edges.depth, params.deepest)
    edges = Edges(edge, max_id, infinite, infinite, max_id)
    if params.top_p < 1:
        searched = candidates
        target = _target_mass(params, candidates, edges, min_p_mass, tile)
        if is_whole(params, candidates.bounds) == 0:
            masses = _masses(candidates, edge, LONG_LIST_TILES * tile)
            target -= sure_mass
            short = (tl.sum(masses, 0) < target) & (candidates.bounds.lowered > 0)
            if (target <= 0) | short | (2 * candidates.size > list_capacity):
                candidates = all_candidates(candidates, vocab)
                searched = candidates
                target = _target_mass(params, candidates, edges, min_p_mass, tile)
            else:
                bins = tl.arange(0, BINS)
                is_before = (tl.cumsum(masses, 0) < target).to(tl.int32)
                bin_index = tl.minimum(tl.sum(is_before, 0), BINS - 1)
                target -= tl.sum(tl.where(bins < bin_index, masses, 0), 0)
                searched = _select_bin(candidates, bin_index, LONG_LIST_TILES * tile)
        key, mass_before = _quantile(searched, edges, target, BY_MASS, tile)
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        share = tl.maximum((tl.exp(-edge) * MASS_UNITS).to(tl.int64), 1)
        needed = (target - mass_before + share - 1) // share
        edges = Edges(edge, max_id, infinite, infinite, max_id)
        if needed < _ties(searched, edge, tile):
            last, _ = _quantile(searched, edges, needed, BY_ID, tile)
            edges = Edges(edge, last, infinite, infinite, max_id)
    return edges, candidates


@triton.jit
def _ties(candidates, edge, tile: tl.constexpr):
    """How many tokens have exactly this depth."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, candidates.size, tile):
        _, mask, depth = load_candidates(candidates, start, tile)
        count += tl.sum((mask & (depth == edge)).to(tl.int32), 0)
    return count


@triton.jit
def _target_mass(params, candidates, edges, min_p_mass, tile: tl.constexpr):
    """The mass that top-p keeps of a row."""
    total = candidates.bounds.total.to(tl.float64) * MASS_UNITS
    if edges.depth < float("inf"):
        mass = min_p_mass
        if is_whole(params, candidates.bounds):
            mass = tl.zeros_like(mass)
            for start in range(0, candidates.size, tile):
                _, _, depth = load_candidates(candidates, start, tile)
                mass += tl.sum(_mass(depth, edges.depth), 0)
        total = mass.to(tl.float64)
    return target_of(params.top_p, total)


@triton.jit
def _masses(candidates, edge, tile: tl.constexpr):
    """The mass of each bin of a list's depths, without that of surely kept tokens."""
    bins = tl.arange(0, BINS)
    sums = tl.zeros([BINS], tl.int64)
    for start in range(0, candidates.size, tile):
        _, _, depth = load_candidates(candidates, start, tile)
        bin_index = _bin_of(candidates, depth)
        weight = tl.where(depth < candidates.bounds.low, 0, _mass(depth, edge))
        sums += tl.sum(
            tl.where(bin_index[None, :] == bins[:, None], weight[None, :], 0), 1
        )
    return sums


@triton.jit
def _select_bin(candidates, bin_index, tile: tl.constexpr):
    """A list of the tokens of another list in this bin of its depths, stored after it."""
    min_depth = tl.full([], float("inf"), tl.float32)
    max_depth = tl.full([], 0.0, tl.float32)
    behind = candidates.ids + candidates.size
    size = tl.full([], 0, tl.int32)
    for start in range(0, candidates.size, tile):
        ids, mask, depth = load_candidates(candidates, start, tile)
        is_in_bin = (
            mask
            & (depth >= candidates.bounds.low)
            & (_bin_of(candidates, depth) == bin_index)
        )
        min_depth = tl.minimum(
            min_depth, tl.min(tl.where(is_in_bin, depth, float("inf")), 0)
        )
        max_depth = tl.maximum(max_depth, tl.max(tl.where(is_in_bin, depth, 0.0), 0))
        is_in_bin = is_in_bin.to(tl.int32)
        tl.store(behind + size + tl.cumsum(is_in_bin, 0) - 1, ids, mask=is_in_bin > 0)
        size += tl.sum(is_in_bin, 0)
    tl.debug_barrier()  # other threads read what one has written
    row_bounds = candidates.bounds
    bounds = DepthBounds(
        row_bounds.largest,
        row_bounds.total,
        row_bounds.mean,
        max_depth,
        min_depth,
        row_bounds.lowered,
        row_bounds.wait,
        row_bounds.floor,
    )
    return CandidateList(
        candidates.logits,
        behind,
        size,
        candidates.has_all,
        bounds,
        candidates.temperature,
    )


@triton.jit
def _bin_of(candidates, depth):
    """The bin of a depth in a list's range: deeper ones are never in an earlier bin."""
    scale = BINS / tl.maximum(
        candidates.bounds.limit - candidates.bounds.low, MIN_DEPTH_RANGE
    )
    above = tl.maximum(depth - candidates.bounds.low, 0.0)
    return tl.minimum(above * scale, BINS - 1).to(tl.int32)


@triton.jit
def typical_of(params, candidates, edges, tile: tl.constexpr):
    """The edges with typical-p: of those within `edges` how far from the mean depth
    tokens are kept, and the last id exactly that far.
    """
    total = candidates.bounds.total.to(tl.float64) * MASS_UNITS
    mean = candidates.bounds.mean
    if only_typical_p(params) == 0:
        kept_mass = tl.full([], 0, tl.int64)
        moment = tl.full([], 0, tl.int64)
        for start in range(0, candidates.size, tile):
            ids, mask, depth = load_candidates(candidates, start, tile)
            mass = tl.where(
                is_kept(edges, ids, mask, depth), _mass(depth, edges.depth), 0
            )
            kept_mass += tl.sum(mass, 0)
            deep = tl.where(mass > 0, depth, 0.0)  # times a mass it is below 1
            moment += tl.sum(tl.where(mass > 0, _moment(deep), 0), 0)
        total = kept_mass.to(tl.float64)
        mean = (moment.to(tl.float64) / total).to(tl.float32)
    target = target_of(params.typical_p, total)
    max_id = tl.full([], 0xFFFFFFFF, tl.uint32)
    edges = Edges(edges.depth, edges.last, mean, mean, max_id)
    key, before = _quantile(candidates, edges, target, BY_DEVIATION, tile)
    distance = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
    edges = Edges(edges.depth, edges.last, mean, distance, max_id)
    last, _ = _quantile(candidates, edges, target - before, BY_TYPICAL_ID, tile)
    return Edges(edges.depth, edges.last, mean, distance, last)


@triton.jit
def _moment(depth):
    """Depth times mass, as an integer."""
    return (depth * tl.exp(-depth) * MASS_UNITS).to(tl.int64)
