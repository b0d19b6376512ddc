"""The edges of a row's filters, found without a sort: weighted quantiles, for the kernels
of sample_kernels.py; sample.py has their theory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.bounds import (
    MASS_UNITS,
    NARROWEST,
    DepthBounds,
    depth_of,
    is_whole,
    mass_of,
    only_typical_p,
    target_of,
)

INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32's, the largest depth
BITS_A_PASS = tl.constexpr(4)  # of a key that `_quantile` searches
CHOICES = tl.constexpr(16)  # of these bits
PARTS = tl.constexpr(16)  # of a range of depths, of which `_one_part` takes one
MANY = tl.constexpr(4)  # tiles: passes over long lists wait for memory less often
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
    every: tl.tensor  # 1: all ids count, and there is no list
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
def listed(candidates, start, tile: tl.constexpr):
    """Ids of a row's list, their mask, and their depth, which is never -0."""
    inside = start + tl.arange(0, tile) < candidates.size
    ids = start + tl.arange(0, tile)
    length = tl.where(candidates.every > 0, 0, candidates.size)
    ids = tl.load(candidates.ids + ids, mask=ids < length, other=ids)
    x = tl.load(candidates.logits + ids, mask=inside, other=float("-inf"))
    return ids, inside, depth_of(x, candidates.bounds.largest, candidates.temperature)


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
    one = tl.full([], 1, tl.int32)
    return CandidateList(
        candidates.logits, candidates.ids, vocab, one, bounds, candidates.temperature
    )


@triton.jit
def _mass(depth, edge):
    return tl.where(depth <= edge, mass_of(depth), 0)


@triton.jit
def left_by(edges, ids, inside, depth):
    """Which tokens are kept by their depths."""
    at_edge = (depth == edges.depth) & (ids.to(tl.uint32) <= edges.last)
    return inside & ((depth < edges.depth) | at_edge)


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
        base, first = _alike(candidates.bounds)
    for level in range(first, 8):
        steps = (tl.arange(0, CHOICES) << (28 - BITS_A_PASS * level)).to(tl.uint32)
        sums = tl.zeros([CHOICES], tl.int64)
        if (kind == BY_TOKENS) + (kind == BY_ID):  # weights are 1
            sums = tl.zeros([CHOICES], tl.int32)
        for start in range(0, candidates.size, tile):
            ids, inside, depth = listed(candidates, start, tile)
            key = depth.to(tl.uint32, bitcast=True)
            weight = inside.to(sums.dtype)
            if kind == BY_MASS:  # of depths up to the edge
                weight = _mass(depth, edges.depth)
                weight = tl.where(depth < candidates.bounds.low, 0, weight)
            if kind == BY_ID:
                key = ids.to(tl.uint32)
                weight = (inside & (depth == edges.depth)).to(sums.dtype)
            if kind >= BY_DEVIATION:  # and of ids that are typical
                far = tl.abs(depth - edges.mean)
                key = far.to(tl.uint32, bitcast=True)
                left = left_by(edges, ids, inside, depth)
                if kind == BY_TYPICAL_ID:
                    key = ids.to(tl.uint32)
                    left &= far == edges.distance
                weight = tl.where(left, _mass(depth, edges.depth), 0)
            below = key[None, :] < (base + steps)[:, None]
            sums += tl.sum(tl.where(below, weight[None, :], 0), 1)
        base += tl.max(tl.where(sums < target, steps, 0), 0)
        before = tl.max(tl.where(sums < target, sums, 0), 0).to(tl.int64)
    return base, before


@triton.jit
def _alike(bounds):
    """The highest bits that all depths between two have in common, and how many groups of
    four.
    """
    low = bounds.low.to(tl.uint32, bitcast=True)
    differ = low ^ bounds.limit.to(tl.uint32, bitcast=True)
    shifts = 28 - tl.arange(0, 8) * BITS_A_PASS
    count = tl.sum(((differ >> shifts.to(tl.uint32)) == 0).to(tl.int32), 0)
    rest = (tl.full([], 1, tl.int64) << (32 - count * BITS_A_PASS).to(tl.int64)) - 1
    return (low.to(tl.int64) & ~rest).to(tl.uint32), count


@triton.jit
def edges_of(params, candidates, sure, within, vocab, width, tile: tl.constexpr):
    """The depth up to which tokens are kept, and the last id exactly at it; and the list
    itself, or all ids if the guess was wrong.

    `sure` is the mass of surely kept tokens, `within` that of all that min-p keeps, if
    not all are listed.
    """
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, every, infinite, infinite, every)
    if params.top_k > 0:
        if (candidates.bounds.lowered > 0) & (candidates.size < params.top_k):
            candidates = all_candidates(candidates, vocab)
        key, _ = _quantile(candidates, edges, params.top_k, BY_TOKENS, tile)
        # Fewer than k: all.
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        edges = Edges(edge, every, infinite, infinite, every)
    edge = tl.minimum(edges.depth, params.deepest)
    edges = Edges(edge, every, infinite, infinite, every)
    if params.top_p < 1:
        near = candidates
        target = _wanted(params, candidates, edges, within, tile)
        if is_whole(params, candidates.bounds) == 0:
            masses = _masses(candidates, edge, MANY * tile)
            target -= sure
            short = (tl.sum(masses, 0) < target) & (candidates.bounds.lowered > 0)
            if (target <= 0) | short | (2 * candidates.size > width):
                candidates = all_candidates(candidates, vocab)
                near = candidates
                target = _wanted(params, candidates, edges, within, tile)
            else:
                parts = tl.arange(0, PARTS)
                before = (tl.cumsum(masses, 0) < target).to(tl.int32)
                part = tl.minimum(tl.sum(before, 0), PARTS - 1)
                target -= tl.sum(tl.where(parts < part, masses, 0), 0)
                near = _one_part(candidates, part, MANY * tile)
        key, before = _quantile(near, edges, target, BY_MASS, tile)
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        share = tl.maximum((tl.exp(-edge) * MASS_UNITS).to(tl.int64), 1)
        needed = (target - before + share - 1) // share
        edges = Edges(edge, every, infinite, infinite, every)
        if needed < _ties(near, edge, tile):
            last, _ = _quantile(near, edges, needed, BY_ID, tile)
            edges = Edges(edge, last, infinite, infinite, every)
    return edges, candidates


@triton.jit
def _ties(candidates, edge, tile: tl.constexpr):
    """How many tokens have exactly this depth."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, candidates.size, tile):
        _, inside, depth = listed(candidates, start, tile)
        count += tl.sum((inside & (depth == edge)).to(tl.int32), 0)
    return count


@triton.jit
def _wanted(params, candidates, edges, within, tile: tl.constexpr):
    """The mass that top-p keeps of a row."""
    total = candidates.bounds.total.to(tl.float64) * MASS_UNITS
    if edges.depth < float("inf"):
        held = within
        if is_whole(params, candidates.bounds):
            held = tl.zeros_like(held)
            for start in range(0, candidates.size, tile):
                _, _, depth = listed(candidates, start, tile)
                held += tl.sum(_mass(depth, edges.depth), 0)
        total = held.to(tl.float64)
    return target_of(params.top_p, total)


@triton.jit
def _masses(candidates, edge, tile: tl.constexpr):
    """The mass of each part of a list's depths, without that of surely kept tokens."""
    parts = tl.arange(0, PARTS)
    sums = tl.zeros([PARTS], tl.int64)
    for start in range(0, candidates.size, tile):
        _, _, depth = listed(candidates, start, tile)
        part = _part(candidates, depth)
        weight = tl.where(depth < candidates.bounds.low, 0, _mass(depth, edge))
        sums += tl.sum(tl.where(part[None, :] == parts[:, None], weight[None, :], 0), 1)
    return sums


@triton.jit
def _one_part(candidates, wanted, tile: tl.constexpr):
    """A list of the tokens of another in this part of its depths, stored after that."""
    least = tl.full([], float("inf"), tl.float32)
    most = tl.full([], 0.0, tl.float32)
    behind = candidates.ids + candidates.size
    size = tl.full([], 0, tl.int32)
    for start in range(0, candidates.size, tile):
        ids, inside, depth = listed(candidates, start, tile)
        here = (
            inside
            & (depth >= candidates.bounds.low)
            & (_part(candidates, depth) == wanted)
        )
        least = tl.minimum(least, tl.min(tl.where(here, depth, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(here, depth, 0.0), 0))
        here = here.to(tl.int32)
        tl.store(behind + size + tl.cumsum(here, 0) - 1, ids, mask=here > 0)
        size += tl.sum(here, 0)
    tl.debug_barrier()  # other threads read what one has written
    row_bounds = candidates.bounds
    bounds = DepthBounds(
        row_bounds.largest,
        row_bounds.total,
        row_bounds.mean,
        most,
        least,
        row_bounds.lowered,
        row_bounds.wait,
        row_bounds.floor,
    )
    return CandidateList(
        candidates.logits, behind, size, candidates.every, bounds, candidates.temperature
    )


@triton.jit
def _part(candidates, depth):
    """The part of a depth in a list's range: deeper ones are never in an earlier part."""
    scale = PARTS / tl.maximum(candidates.bounds.limit - candidates.bounds.low, NARROWEST)
    above = tl.maximum(depth - candidates.bounds.low, 0.0)
    return tl.minimum(above * scale, PARTS - 1).to(tl.int32)


@triton.jit
def typical_of(params, candidates, edges, tile: tl.constexpr):
    """The edges with typical-p: of those within `edges` how far from the mean depth
    tokens are kept, and the last id exactly that far.
    """
    total = candidates.bounds.total.to(tl.float64) * MASS_UNITS
    mean = candidates.bounds.mean
    if only_typical_p(params) == 0:
        held = tl.full([], 0, tl.int64)
        moment = tl.full([], 0, tl.int64)
        for start in range(0, candidates.size, tile):
            ids, inside, depth = listed(candidates, start, tile)
            mass = tl.where(
                left_by(edges, ids, inside, depth), _mass(depth, edges.depth), 0
            )
            held += tl.sum(mass, 0)
            deep = tl.where(mass > 0, depth, 0.0)  # times a mass it is below 1
            moment += tl.sum(tl.where(mass > 0, _moment(deep), 0), 0)
        total = held.to(tl.float64)
        mean = (moment.to(tl.float64) / total).to(tl.float32)
    target = target_of(params.typical_p, total)
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    edges = Edges(edges.depth, edges.last, mean, mean, every)
    key, before = _quantile(candidates, edges, target, BY_DEVIATION, tile)
    distance = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
    edges = Edges(edges.depth, edges.last, mean, distance, every)
    last, _ = _quantile(candidates, edges, target - before, BY_TYPICAL_ID, tile)
    return Edges(edges.depth, edges.last, mean, distance, last)


@triton.jit
def _moment(depth):
    """Depth times mass, as an integer."""
    return (depth * tl.exp(-depth) * MASS_UNITS).to(tl.int64)
