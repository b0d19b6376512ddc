"""The Triton kernels of sampling; sample.py has their theory, and launches them.

A row is sampled in two launches. `scan` reads its logits chunk by chunk: it stores the
largest logit of every group, and each chunk's winner. `finish` compares the winners. A
row that is restricted (by top-k, top-p, min-p or typical-p) takes three launches more:
its chunks have no winners but the masses of their groups, from which `bound`, `weigh` and
`gather` find which tokens may be kept at all; `finish` then finds which are, and draws.
"""

import triton
import triton.language as tl

from minfer.kernels.buckets import (
    BUCKETS,
    DEEPEST_BOUND,
    FACTS,
    MORE,
    Bounds,
    aim_of,
    asked_of,
    bucket_of,
    depth_of,
    floor_of,
    guess_of,
    limit_of,
    load_bounds,
    mass_of,
    most_within,
    store_bounds,
    typical_alone,
)
from minfer.kernels.noise import waiting
from minfer.kernels.pdl import follow
from minfer.kernels.quantiles import Edges, Kept, edges_of, left_by, listed, typical_of

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf - -inf would be NaN


@triton.jit
def scan(
    logits,
    stride,
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    sums,
    moments,
    lists,
    counts,
    width,
    vocab,
    parts,
    filtered: tl.constexpr,
    chunk: tl.constexpr,
    group: tl.constexpr,
):
    """Grid [chunks, rows]: groups' largest logits; and their masses, or a winner.

    tops and sums are [rows, groups], and so are moments: sums of mass times depth below
    the group's largest, where typical-p wants them. lists [rows, width] holds ids, counts
    [rows] how many: of a row that is not restricted one of each chunk, else none yet.
    """
    follow()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    asked = asked_of(
        who, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, filtered
    )
    ids = part * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN: as bad
    x = tl.reshape(x, [chunk // group, group])
    top = tl.max(x, 1)
    floor = tl.maximum(top, LOWEST)
    here = (row * parts + part) * (chunk // group) + tl.arange(0, chunk // group)
    tl.store(tops + here, top)
    tl.store(counts + row, tl.where(asked.restricted, 0, parts), mask=part == 0)
    if asked.restricted:
        tl.store(sums + here, tl.sum(tl.exp((x - floor[:, None]) / asked.temperature), 1))
        if asked.typical_p < 1:
            below = (floor[:, None] - x) / asked.temperature
            share = tl.where(below < DEEPEST_BOUND, below * tl.exp(-below), 0.0)
            tl.store(moments + here, tl.sum(share, 1))
    else:
        score = tl.max(floor, 0) - tl.reshape(x, [chunk])
        if not asked.greedy:
            times = waiting(who, streams, positions, row, ids)
            score = times * tl.exp(score / asked.temperature)
        lowest = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        tl.store(lists + row * width + part, lowest)


@triton.jit
def bound(
    logits,
    stride,
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    tops,
    sums,
    moments,
    bounds,
    weights,
    vocab,
    groups,
    group: tl.constexpr,
    pad: tl.constexpr,
    samples: tl.constexpr,
    few: tl.constexpr,
):
    """Grid [rows]: what restricted rows' groups tell: bounds [rows, FACTS] as `Bounds`.

    weights [rows, BUCKETS] are made zero.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    asked = asked_of(
        who, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
    )
    if asked.restricted:
        top = tl.load(
            tops + row * groups + lanes, mask=lanes < groups, other=float("-inf")
        )
        largest = tl.max(top, 0)
        depth = tl.div_rn(largest - top, asked.temperature)
        mass = tl.load(sums + row * groups + lanes, mask=lanes < groups, other=0.0)
        mass = mass * tl.exp(-depth)
        total = tl.sum(mass, 0)
        limit = limit_of(asked, depth, mass, total, group)
        mean = 0.0
        if typical_alone(asked):
            # Of a group without any mass nobody reads its depth, which may be infinite.
            moment = tl.load(
                moments + row * groups + lanes, mask=lanes < groups, other=0.0
            )
            moment = tl.where(mass > 0, moment * tl.exp(-depth) + mass * depth, 0.0)
            mean = tl.sum(moment, 0) / total
            limit = tl.maximum(limit, 2 * MORE * mean)
        low, scale = 0.0, 0.0
        some = ((asked.top_k > 0) | (asked.top_p < 1)) & (asked.typical_p >= 1)
        if some & (most_within(depth, mass, limit, group) > few):
            line = logits + row * stride
            low, scale = guess_of(asked, line, largest, total, limit, vocab, samples)
        floor = floor_of(largest, limit, asked.temperature)
        facts = Bounds(largest, total, mean, limit, low, scale, floor)
        store_bounds(bounds + row * FACTS, facts)
        buckets = tl.arange(0, BUCKETS)
        tl.store(weights + row * BUCKETS + buckets, tl.zeros([BUCKETS], tl.int64))
    else:
        none = tl.full([], 0.0, tl.float32)
        nan = tl.full([], float("nan"), tl.float32)
        facts = Bounds(none, none, none, none, none, none, nan)
        store_bounds(bounds + row * FACTS, facts)


@triton.jit
def weigh(
    logits,
    stride,
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    tops,
    bounds,
    weights,
    vocab,
    groups,
    chunk: tl.constexpr,
    group: tl.constexpr,
):
    """Grid [chunks, rows]: weights [rows, BUCKETS] of the tokens that a row may keep, of
    rows that have a range: masses, or their number for top-k.
    """
    follow()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    facts = load_bounds(bounds + row * FACTS)
    here = part * (chunk // group) + tl.arange(0, chunk // group)
    top = tl.max(tl.load(tops + row * groups + here), 0)
    if (facts.scale > 0) & (top >= facts.floor):
        asked = asked_of(
            who, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
        )
        ids = part * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        depth = depth_of(x, facts.largest, asked.temperature)
        inside = (ids < vocab) & (depth <= facts.limit)
        weight = tl.where(asked.top_k > 0, 1, mass_of(depth))
        bucket = tl.where(inside, bucket_of(facts, depth), BUCKETS)
        buckets = tl.arange(0, BUCKETS)
        each = tl.where(bucket[None, :] == buckets[:, None], weight[None, :], 0)
        made = tl.sum(each, 1)
        at = weights + row * BUCKETS + buckets
        tl.atomic_add(at, made, mask=made > 0, sem="relaxed")


@triton.jit
def gather(
    logits,
    stride,
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    bounds,
    weights,
    lists,
    counts,
    width,
    vocab,
    groups,
    chunk: tl.constexpr,
    group: tl.constexpr,
):
    """Grid [chunks, rows]: lists the ids that a restricted row may keep, in any order;
    of those it keeps for sure only each chunk's winner.
    """
    follow()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    facts = load_bounds(bounds + row * FACTS)
    here = part * (chunk // group) + tl.arange(0, chunk // group)
    # The last span may end beyond the last chunk.
    most = tl.load(tops + row * groups + here, mask=here < groups, other=float("-inf"))
    top = tl.max(most, 0)
    if top >= facts.floor:
        asked = asked_of(
            who, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
        )
        aim = aim_of(asked, facts, weights + row * BUCKETS)
        ids = part * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        depth = depth_of(x, facts.largest, asked.temperature)
        inside = (ids < vocab) & (depth <= facts.limit)
        bucket = bucket_of(facts, depth)
        sure = inside & (bucket < aim.first)
        keep = inside & (bucket >= aim.first) & (bucket <= aim.edge)
        if tl.max(sure.to(tl.int32), 0) > 0:
            times = waiting(who, streams, positions, row, ids)
            score = tl.where(sure, -depth - tl.log(times), float("-inf"))
            best = sure & (score == tl.max(score, 0))
            keep |= ids == tl.min(tl.where(best, ids, vocab), 0)
        keep = keep.to(tl.int32)
        base = tl.atomic_add(counts + row, tl.sum(keep, 0), sem="relaxed")
        at = lists + row * width + base + tl.cumsum(keep, 0) - 1
        tl.store(at, ids, mask=keep > 0)


@triton.jit
def finish(
    logits,
    stride,
    who,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    bounds,
    weights,
    lists,
    counts,
    width,
    vocab,
    out,
    bad,
    groups,
    filtered: tl.constexpr,
    pad: tl.constexpr,
    tile: tl.constexpr,
):
    """Grid [rows]: draws from a row's list into out [rows]; bad [rows]: 1 if broken."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    asked = asked_of(
        who, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, filtered
    )
    top = tl.load(tops + row * groups + lanes, mask=lanes < groups, other=float("-inf"))
    largest = tl.max(top, 0)
    size = tl.load(counts + row)
    line = logits + row * stride
    none = tl.full([], 0.0, tl.float32)
    facts = Bounds(largest, none, none, none, none, none, none)
    first = tl.full([], 0, tl.int32)
    kept = Kept(line, lists + row * width, size, facts, first, asked.temperature)
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, every, none, infinite, every)
    if asked.restricted:
        facts = load_bounds(bounds + row * FACTS)
        aim = aim_of(asked, facts, weights + row * BUCKETS)
        kept = Kept(line, lists + row * width, size, facts, aim.first, asked.temperature)
        edges = edges_of(asked, kept, aim, tile)
        edges = Edges(edges.depth, edges.last, none, infinite, every)
        if asked.typical_p < 1:
            edges = typical_of(asked, kept, edges, tile)
    best = float("-inf")
    token = vocab
    for start in range(0, size, tile):
        ids, inside, depth = listed(kept, start, tile)
        score = -depth - tl.where(
            asked.greedy, 0.0, tl.log(waiting(who, streams, positions, row, ids))
        )
        allowed = left_by(edges, ids, inside, depth)
        if filtered:
            far = tl.abs(depth - edges.mean)
            at_edge = (far == edges.distance) & (ids.to(tl.uint32) <= edges.last_typical)
            allowed &= (far < edges.distance) | at_edge
        score = tl.where(allowed, score, float("-inf"))
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, ids, vocab), 0)
        token = tl.where((high > best) | ((high == best) & (first < token)), first, token)
        best = tl.maximum(best, high)
    fine = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(fine, token, 0))
    tl.store(bad + row, tl.where(fine, 0, 1))
