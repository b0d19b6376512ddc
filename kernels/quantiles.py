"""How a row's draws are restricted, found without a sort: weighted quantiles, within the
kernels of sample_kernels.py; sample.py has their theory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from minfer.kernels.buckets import (
    MASS_UNITS,
    Bounds,
    bucket_of,
    depth_of,
    lists_whole,
    mass_of,
    target_of,
    typical_alone,
)

INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32's, the largest depth
BITS_A_PASS = tl.constexpr(4)  # of a key that `_quantile` looks for
CHOICES = tl.constexpr(16)  # of these bits
# What `_quantile` looks for: a depth by tokens, a depth by mass, an id at a depth.
BY_TOKENS = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
BY_ID = tl.constexpr(2)
BY_DEVIATION = tl.constexpr(3)  # a distance from the mean depth, by mass
BY_TYPICAL_ID = tl.constexpr(4)  # an id at that distance, by mass


class Kept(NamedTuple):
    """A row's list of the ids that may be kept, and what their depths come from.

    Those in buckets before `first` are kept for sure, and not all of these are listed.
    """

    logits: tl.tensor  # pointer to the row's
    ids: tl.tensor  # pointer to the list
    size: tl.tensor  # of the list
    bounds: Bounds
    first: tl.tensor
    temperature: tl.tensor


class Edges(NamedTuple):
    """Which tokens are kept: of depths, and of distances from the mean depth, up to an
    edge; and of those at just the edge the ids up to the last.
    """

    depth: tl.tensor
    last: tl.tensor
    mean: tl.tensor
    distance: tl.tensor
    last_typical: tl.tensor


@triton.jit
def listed(kept, start, tile: tl.constexpr):
    """Ids of a row's list, whether they are there, and their depth, which is never -0."""
    inside = start + tl.arange(0, tile) < kept.size
    ids = tl.load(kept.ids + start + tl.arange(0, tile), mask=inside, other=0)
    x = tl.load(kept.logits + ids, mask=inside, other=float("-inf"))
    return ids, inside, depth_of(x, kept.bounds.largest, kept.temperature)


@triton.jit
def _mass(depth, edge):
    return tl.where(depth <= edge, mass_of(depth), 0)


@triton.jit
def left_by(edges, ids, inside, depth):
    """Which tokens are kept by their depths."""
    at_edge = (depth == edges.depth) & (ids.to(tl.uint32) <= edges.last)
    return inside & ((depth < edges.depth) | at_edge)


@triton.jit
def _quantile(kept, edges, target, kind: tl.constexpr, tile: tl.constexpr):
    """The least key up to which tokens weigh `target` > 0, and the weight before it.

    A key is the bits of a depth or of a distance from the mean depth, or an id at the
    edge of these; a weight is 1 or a mass. It is found from its highest bits on: a pass
    sums up what is below each of 16 choices.
    """
    base = tl.full([], 0, tl.uint32)
    before = tl.full([], 0, tl.int64)
    ids_alone = (kind == BY_ID) + (kind == BY_TYPICAL_ID)
    for level in range(3 * ids_alone, 8):  # ids have 20 bits
        steps = (tl.arange(0, CHOICES) << (28 - BITS_A_PASS * level)).to(tl.uint32)
        sums = tl.zeros([CHOICES], tl.int64)
        if (kind == BY_TOKENS) + (kind == BY_ID):  # weights are 1
            sums = tl.zeros([CHOICES], tl.int32)
        for start in range(0, kept.size, tile):
            ids, inside, depth = listed(kept, start, tile)
            key = depth.to(tl.uint32, bitcast=True)
            weight = inside.to(sums.dtype)
            if kind == BY_MASS:  # of depths up to the edge
                weight = _mass(depth, edges.depth)
                sure = bucket_of(kept.bounds, depth) < kept.first
                weight = tl.where(sure, 0, weight)
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
def edges_of(asked, kept, aim, tile: tl.constexpr):
    """Up to which depth tokens are kept, and the last id that is at just that."""
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, every, infinite, infinite, every)
    if asked.top_k > 0:
        key, _ = _quantile(kept, edges, asked.top_k, BY_TOKENS, tile)
        # Fewer than k: all.
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        edges = Edges(edge, every, infinite, infinite, every)
    edge = tl.minimum(edges.depth, asked.deepest)
    edges = Edges(edge, every, infinite, infinite, every)
    if asked.top_p < 1:
        target = _wanted(asked, kept, edges, aim, tile)
        key, before = _quantile(kept, edges, target, BY_MASS, tile)
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        share = tl.maximum((tl.exp(-edge) * MASS_UNITS).to(tl.int64), 1)
        needed = (target - before + share - 1) // share
        edges = Edges(edge, every, infinite, infinite, every)
        if needed < _ties(kept, edge, tile):
            last, _ = _quantile(kept, edges, needed, BY_ID, tile)
            edges = Edges(edge, last, infinite, infinite, every)
    return edges


@triton.jit
def _ties(kept, edge, tile: tl.constexpr):
    """How many tokens are just as deep."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, kept.size, tile):
        _, inside, depth = listed(kept, start, tile)
        count += tl.sum((inside & (depth == edge)).to(tl.int32), 0)
    return count


@triton.jit
def _wanted(asked, kept, edges, aim, tile: tl.constexpr):
    """The mass that top-p keeps of a list, besides what it keeps for sure."""
    target = aim.target - aim.held
    if lists_whole(asked) | (kept.bounds.scale == 0):
        total = kept.bounds.total.to(tl.float64) * MASS_UNITS
        if edges.depth < float("inf"):
            held = tl.full([], 0, tl.int64)
            for start in range(0, kept.size, tile):
                _, _, depth = listed(kept, start, tile)
                held += tl.sum(_mass(depth, edges.depth), 0)
            total = held.to(tl.float64)
        target = target_of(asked.top_p, total)
    return target


@triton.jit
def typical_of(asked, kept, edges, tile: tl.constexpr):
    """Of those within `edges` also how far from the mean depth tokens are kept, and the
    last id that is just so far.
    """
    total = kept.bounds.total.to(tl.float64) * MASS_UNITS
    mean = kept.bounds.mean
    if typical_alone(asked) == 0:
        held = tl.full([], 0, tl.int64)
        moment = tl.full([], 0, tl.int64)
        for start in range(0, kept.size, tile):
            ids, inside, depth = listed(kept, start, tile)
            mass = tl.where(
                left_by(edges, ids, inside, depth), _mass(depth, edges.depth), 0
            )
            held += tl.sum(mass, 0)
            deep = tl.where(mass > 0, depth, 0.0)  # times a mass it is below 1
            moment += tl.sum(tl.where(mass > 0, _moment(deep), 0), 0)
        total = held.to(tl.float64)
        mean = (moment.to(tl.float64) / total).to(tl.float32)
    target = target_of(asked.typical_p, total)
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    edges = Edges(edges.depth, edges.last, mean, mean, every)
    key, before = _quantile(kept, edges, target, BY_DEVIATION, tile)
    distance = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
    edges = Edges(edges.depth, edges.last, mean, distance, every)
    last, _ = _quantile(kept, edges, target - before, BY_TYPICAL_ID, tile)
    return Edges(edges.depth, edges.last, mean, distance, last)


@triton.jit
def _moment(depth):
    """Depth times mass, as an integer."""
    return (depth * tl.exp(-depth) * MASS_UNITS).to(tl.int64)
