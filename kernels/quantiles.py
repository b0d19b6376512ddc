"""How a row's draws are restricted, found without a sort: weighted quantiles, within the
kernels of sample_kernels.py; sample.py has their theory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

GREEDY_BELOW = tl.constexpr(1e-5)  # a temperature
INFINITY_BITS = tl.constexpr(0x7F800000)  # of float32's, the largest depth
# Masses are added up as integers, so that their order does not show: in units of 2^-43,
# as 2^20 of at most 1 then fit in 63 bits.
MASS_UNITS = tl.constexpr(2.0**43)
DEEPEST_BOUND = tl.constexpr(128.0)  # exp(-128) is nothing to float32
HALVINGS = tl.constexpr(12)  # of that range, until its limit is near enough
NEARLY = tl.constexpr(0.999)  # of a mass: room for float32's sums
MORE = tl.constexpr(1.001)  # of a mean
BITS_A_PASS = tl.constexpr(4)  # of a key that `_quantile` looks for
CHOICES = tl.constexpr(16)  # of these bits
# What `_quantile` looks for: a depth by tokens, a depth by mass, an id at a depth.
BY_TOKENS = tl.constexpr(0)
BY_MASS = tl.constexpr(1)
BY_ID = tl.constexpr(2)
BY_DEVIATION = tl.constexpr(3)  # a distance from the mean depth, by mass
BY_TYPICAL_ID = tl.constexpr(4)  # an id at that distance, by mass


class Asked(NamedTuple):
    """How a row samples."""

    temperature: tl.tensor  # 1 if greedy
    top_k: tl.tensor  # 0: all
    top_p: tl.tensor
    deepest: tl.tensor  # a token's depth at most, from min-p
    typical_p: tl.tensor
    greedy: tl.tensor
    restricted: tl.tensor


class Kept(NamedTuple):
    """A row's list of the ids that may be kept, and what their depths come from."""

    logits: tl.tensor  # pointer to the row's
    ids: tl.tensor  # pointer to the list
    size: tl.tensor  # of the list
    largest: tl.tensor  # logit
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
def asked_of(
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    row,
    vocab,
    filtered: tl.constexpr,
):
    """How a row samples; `filtered` False promises that nothing restricts any."""
    owner = tl.load(who + row)
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
    return Asked(temperature, top_k, top_p, deepest, typical_p, greedy, restricted)


@triton.jit
def typical_alone(asked):
    """Whether typical-p is all that restricts a row."""
    others = (asked.top_k > 0) | (asked.top_p < 1) | (asked.deepest < float("inf"))
    return (asked.typical_p < 1) & (others == 0)


@triton.jit
def limit_of(asked, depth, mass, total, group: tl.constexpr):
    """A depth that no kept token exceeds, from groups' least depths and their masses."""
    less = 0.0
    more = DEEPEST_BOUND
    share = tl.where(typical_alone(asked), asked.typical_p, asked.top_p)
    for _step in range(HALVINGS):
        limit = (less + more) / 2
        # What is left beyond `limit`: of a group at most as much as all of its tokens.
        left = tl.sum(tl.minimum(mass, group * tl.exp(-limit)), 0)
        light = left < NEARLY * (1 - share) * total
        many = tl.sum((depth <= limit).to(tl.int32), 0) >= asked.top_k
        enough = tl.where(asked.top_k > 0, many, light)
        less = tl.where(enough, less, limit)
        more = tl.where(enough, limit, more)
    # None found: all. What top-p keeps depends on the mass of all that min-p leaves.
    found = (more < DEEPEST_BOUND) & ((asked.top_k > 0) | (asked.deepest == float("inf")))
    return tl.minimum(tl.where(found, more, float("inf")), asked.deepest)


@triton.jit
def listed(kept, start, tile: tl.constexpr):
    """Ids of a row's list, whether they are there, and their depth, which is never -0."""
    inside = start + tl.arange(0, tile) < kept.size
    ids = tl.load(kept.ids + start + tl.arange(0, tile), mask=inside, other=0)
    x = tl.load(kept.logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return ids, inside, tl.abs(tl.div_rn(kept.largest - x, kept.temperature))


@triton.jit
def _mass(depth, edge):
    return tl.where(depth <= edge, (tl.exp(-depth) * MASS_UNITS).to(tl.int64), 0)


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
        for start in range(0, kept.size, tile):
            ids, inside, depth = listed(kept, start, tile)
            key = depth.to(tl.uint32, bitcast=True)
            weight = inside.to(tl.int64)
            if kind == BY_MASS:  # of depths up to the edge
                weight = _mass(depth, edges.depth)
            if kind == BY_ID:
                key = ids.to(tl.uint32)
                weight = (inside & (depth == edges.depth)).to(tl.int64)
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
        before = tl.max(tl.where(sums < target, sums, 0), 0)
    return base, before


@triton.jit
def edges_of(asked, kept, total, tile: tl.constexpr):
    """Up to which depth tokens are kept, and the last id that is at just that."""
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, every, infinite, infinite, every)
    total = total.to(tl.float64) * MASS_UNITS
    if asked.top_k > 0:
        key, _ = _quantile(kept, edges, asked.top_k, BY_TOKENS, tile)
        # Fewer than k: all.
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        edges = Edges(edge, every, infinite, infinite, every)
    edge = tl.minimum(edges.depth, asked.deepest)
    edges = Edges(edge, every, infinite, infinite, every)
    if asked.top_p < 1:
        if edge < float("inf"):
            held = tl.full([], 0, tl.int64)
            for start in range(0, kept.size, tile):
                _, _, depth = listed(kept, start, tile)
                held += tl.sum(_mass(depth, edge), 0)
            total = held.to(tl.float64)
        target = tl.ceil(asked.top_p.to(tl.float64) * total).to(tl.int64)
        target = tl.maximum(target, 1)
        key, before = _quantile(kept, edges, target, BY_MASS, tile)
        edge = tl.minimum(key, INFINITY_BITS).to(tl.float32, bitcast=True)
        share = tl.maximum((tl.exp(-edge) * MASS_UNITS).to(tl.int64), 1)
        needed = (target - before + share - 1) // share
        edges = Edges(edge, every, infinite, infinite, every)
        last, _ = _quantile(kept, edges, needed, BY_ID, tile)
        edges = Edges(edge, last, infinite, infinite, every)
    return edges


@triton.jit
def typical_of(asked, kept, edges, totals, tile: tl.constexpr):
    """Of those within `edges` also how far from the mean depth tokens are kept, and the
    last id that is just so far.
    """
    total = tl.load(totals).to(tl.float64) * MASS_UNITS
    mean = tl.load(totals + 1)
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
    target = tl.ceil(asked.typical_p.to(tl.float64) * total).to(tl.int64)
    target = tl.maximum(target, 1)
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
