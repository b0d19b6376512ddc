"""The Triton kernels of sampling; sample.py has their theory, and launches them.

A row is sampled in two launches. `scan` reads its logits chunk by chunk: it stores the
largest logit of every group, and each chunk's winner. `finish` compares the winners. A
filtered row (by top-k, top-p, min-p or typical-p) takes two launches more: its chunks
have no winners but the masses of their groups, from which `bound` finds the depth of
tokens that may be kept; `gather` lists them, `finish` decides which are kept, and
samples.

Where ranks have a part of the vocabulary each, `scan` runs on this rank's part, and
`choose` on the chunks' winners of all ranks.
"""

import triton
import triton.language as tl

from minfer.kernels.bounds import (
    BOUND_WORDS,
    DEEPEST_BOUND,
    MASS_UNITS,
    MASSES,
    MORE,
    DepthBounds,
    depth_of,
    floor_of,
    guess_of,
    limit_of,
    load_bounds,
    most_within,
    only_min_p,
    only_typical_p,
    row_params,
    store_bounds,
)
from minfer.kernels.noise import uniform, waiting
from minfer.kernels.pdl import follow
from minfer.kernels.quantiles import (
    CandidateList,
    Edges,
    all_candidates,
    edges_of,
    left_by,
    listed,
    typical_of,
)

ROUNDED = tl.constexpr(0.9999)  # of waiting times of tokens
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf - -inf would be NaN


@triton.jit
def scan(
    logits,
    stride,
    rows,
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
    first,
    values,
    filtered: tl.constexpr,
    divided: tl.constexpr,
    chunk: tl.constexpr,
    group: tl.constexpr,
):
    """Grid [chunks, rows]: groups' largest logits; and their masses, or a winner.

    The first column of the logits is of token `first`, where a chunk must begin.

    tops and sums are [rows, groups], and so are moments: sums of mass times depth below
    the group's largest, if typical-p needs them. lists [rows, width] holds ids, counts
    [rows] their number: for a row that is not filtered one of each chunk, else none yet.
    `divided`: values [rows, chunks] get the winners' logits.
    """
    follow()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, filtered
    )
    ids = first + part * chunk + tl.arange(0, chunk)
    line = logits + row * stride - first
    x = tl.load(line + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN: also broken
    x = tl.reshape(x, [chunk // group, group])
    top = tl.max(x, 1)
    floor = tl.maximum(top, LOWEST)
    here = (row * parts + part) * (chunk // group) + tl.arange(0, chunk // group)
    tl.store(tops + here, top)
    tl.store(counts + row, tl.where(params.restricted, 0, parts), mask=part == 0)
    if params.restricted:
        tl.store(
            sums + here, tl.sum(tl.exp((x - floor[:, None]) / params.temperature), 1)
        )
        if params.typical_p < 1:
            below = (floor[:, None] - x) / params.temperature
            share = tl.where(below < DEEPEST_BOUND, below * tl.exp(-below), 0.0)
            tl.store(moments + here, tl.sum(share, 1))
    else:
        score = tl.max(floor, 0) - tl.reshape(x, [chunk])
        if not params.greedy:
            times = waiting(rows, streams, positions, row, ids)
            score = times * tl.exp(score / params.temperature)
        lowest = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        tl.store(lists + row * width + part, lowest)
        if divided:
            # A chunk behind the vocabulary has no winner.
            at = lowest - first - part * chunk
            found = (at >= 0) & (at < chunk) & (lowest < vocab)
            own = tl.load(line + lowest, mask=found, other=float("-inf"))
            tl.store(values + row * width + part, own.to(tl.float32))


@triton.jit
def choose(
    rows,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    values,
    lists,
    parts,
    vocab,
    out,
    bad,
    pad: tl.constexpr,
):
    """Grid [rows]: what `finish` does for rows that are not filtered, from the chunks of
    all ranks: tops, values and lists are [rows, parts], as of `scan`.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    inside = lanes < parts
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, False
    )
    top = tl.load(tops + row * parts + lanes, mask=inside, other=float("-inf"))
    largest = tl.max(top, 0)
    x = tl.load(values + row * parts + lanes, mask=inside, other=float("-inf"))
    ids = tl.load(lists + row * parts + lanes, mask=inside, other=vocab)
    depth = depth_of(x, largest, params.temperature)
    score = _score(params, depth, rows, (streams, positions, row), ids)
    score = tl.where(depth >= 0, score, float("-inf"))  # NaN of a row of only -inf
    token = tl.min(tl.where(score == tl.max(score, 0), ids, vocab), 0)
    fine = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(fine, token, 0))
    tl.store(bad + row, tl.where(fine, 0, 1))


@triton.jit
def _score(params, depth, rows, noise, ids):
    """The largest wins."""
    times = waiting(rows, noise[0], noise[1], noise[2], ids)
    return -depth - tl.where(params.greedy, 0.0, tl.log(times))


@triton.jit
def bound(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    tops,
    sums,
    moments,
    bounds,
    masses,
    vocab,
    groups,
    group: tl.constexpr,
    pad: tl.constexpr,
    samples: tl.constexpr,
    few: tl.constexpr,
    waits: tl.constexpr,
):
    """Grid [rows]: the bounds of filtered rows from their groups: bounds [rows, FACTS] as
    `DepthBounds`.

    masses [rows, MASSES] are set to zero.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
    )
    if params.restricted:
        top = tl.load(
            tops + row * groups + lanes, mask=lanes < groups, other=float("-inf")
        )
        largest = tl.max(top, 0)
        depth = tl.div_rn(largest - top, params.temperature)
        mass = tl.load(sums + row * groups + lanes, mask=lanes < groups, other=0.0)
        mass = mass * tl.exp(-depth)
        total = tl.sum(mass, 0)
        limit = limit_of(params, depth, mass, total, group)
        mean = 0.0
        if only_typical_p(params):
            # The depth of a group without mass is not read: it may be infinite.
            moment = tl.load(
                moments + row * groups + lanes, mask=lanes < groups, other=0.0
            )
            moment = tl.where(mass > 0, moment * tl.exp(-depth) + mass * depth, 0.0)
            mean = tl.sum(moment, 0) / total
            limit = tl.maximum(limit, 2 * MORE * mean)
        low, high = 0.0, float("inf")
        held = 1.0  # mass of surely kept tokens: of the largest logit
        if only_min_p(params):  # all within are surely kept
            low = float("inf")
            held = tl.sum(tl.where(depth <= limit, tl.exp(-depth), 0.0), 0)
        some = ((params.top_k > 0) | (params.top_p < 1)) & (params.typical_p >= 1)
        if some & (most_within(depth, mass, limit, group) > few):
            line = logits + row * stride
            low, high, held = guess_of(
                params, line, largest, total, limit, vocab, samples
            )
        lowered = tl.where(high < limit, 1.0, 0.0)
        guess = tl.minimum(limit, high)
        # What top-p keeps depends on the mass of all that min-p keeps.
        needed = tl.where(params.deepest < float("inf"), limit, guess)
        floor = floor_of(largest, needed, params.temperature)
        row_bounds = DepthBounds(
            largest, total, mean, guess, low, lowered, waits / held, floor
        )
        store_bounds(bounds + row * BOUND_WORDS, row_bounds)
        each = tl.arange(0, MASSES)
        tl.store(masses + row * MASSES + each, tl.zeros([MASSES], tl.int64))
    else:
        none = tl.full([], 0.0, tl.float32)
        nan = tl.full([], float("nan"), tl.float32)
        row_bounds = DepthBounds(none, none, none, none, none, none, none, nan)
        store_bounds(bounds + row * BOUND_WORDS, row_bounds)


@triton.jit
def gather(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    bounds,
    masses,
    lists,
    counts,
    width,
    vocab,
    groups,
    chunk: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
):
    """Grid [chunks, rows]: lists the ids that a filtered row may keep, in any order; of
    the surely kept ones, whose masses are summed, only the few with the shortest waiting
    times.
    """
    follow()
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    row_bounds = load_bounds(bounds + row * BOUND_WORDS)
    here = part * (chunk // group) + tl.arange(0, chunk // group)
    # The last span may end after the last chunk.
    most = tl.load(tops + row * groups + here, mask=here < groups, other=float("-inf"))
    top = tl.max(most, 0)
    if top >= row_bounds.floor:
        params = row_params(
            rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
        )
        line = logits + row * stride
        least = depth_of(top, row_bounds.largest, params.temperature)
        guessed = (params.top_p < 1) & (row_bounds.low + row_bounds.lowered > 0)
        weighed = guessed & (params.deepest < float("inf"))
        sure = tl.zeros([block], tl.float32)
        within = tl.zeros([block], tl.float32)
        for start in range(part * chunk, part * chunk + chunk, block):
            ids = start + tl.arange(0, block)
            x = tl.load(line + ids, mask=ids < vocab, other=float("-inf"))
            depth = depth_of(x, row_bounds.largest, params.temperature)
            depth = tl.where(ids < vocab, depth, float("nan"))
            keep = (depth <= row_bounds.limit) & (depth >= row_bounds.low)
            if weighed:
                within += tl.where(depth <= params.deepest, tl.exp(-depth), 0.0)
            if least < row_bounds.low:
                mass = tl.exp(-depth)
                mass = tl.where(
                    (depth < row_bounds.low) & (depth <= row_bounds.limit), mass, 0.0
                )
                sure += mass
                # Never more than its waiting time, except for rounding.
                v = uniform(rows, streams, positions, row, ids)
                keep |= v < mass * row_bounds.wait
            _append(lists + row * width, counts + row, ids, keep)
        if weighed:
            _add(masses + row * MASSES + 1, within)
        if least < row_bounds.low:
            _add(masses + row * MASSES, sure)


@triton.jit
def _append(line, count, ids, keep):
    """Append to a list, in an order that is a race."""
    keep = keep.to(tl.int32)
    many = tl.sum(keep, 0)
    if many > 0:
        base = tl.atomic_add(count, many, sem="relaxed")
        tl.store(line + base + tl.cumsum(keep, 0) - 1, ids, mask=keep > 0)


@triton.jit
def _add(at, mass):
    """Add up masses as integers, so that the order of programs does not matter."""
    tl.atomic_add(at, (tl.sum(mass, 0) * MASS_UNITS).to(tl.int64), sem="relaxed")


@triton.jit
def finish(
    logits,
    stride,
    rows,
    temperatures,
    top_ks,
    top_ps,
    deepests,
    typical_ps,
    streams,
    positions,
    tops,
    bounds,
    masses,
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
    """Grid [rows]: sample from a row's list into out [rows]; bad [rows]: 1 if broken."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, filtered
    )
    top = tl.load(tops + row * groups + lanes, mask=lanes < groups, other=float("-inf"))
    largest = tl.max(top, 0)
    size = tl.load(counts + row)
    line = logits + row * stride
    none = tl.full([], 0.0, tl.float32)
    row_bounds = DepthBounds(largest, none, none, none, none, none, none, none)
    a_list = tl.full([], 0, tl.int32)
    candidates = CandidateList(
        line, lists + row * width, size, a_list, row_bounds, params.temperature
    )
    every = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, every, none, infinite, every)
    if params.restricted:
        row_bounds = load_bounds(bounds + row * BOUND_WORDS)
        sure = tl.load(masses + row * MASSES)
        within = tl.load(masses + row * MASSES + 1)
        candidates = CandidateList(
            line, lists + row * width, size, a_list, row_bounds, params.temperature
        )
        edges, candidates = edges_of(params, candidates, sure, within, vocab, width, tile)
        edges = Edges(edges.depth, edges.last, none, infinite, every)
        if params.typical_p < 1:
            edges = typical_of(params, candidates, edges, tile)
    noise = streams, positions, row
    token, best = _drawn(params, candidates, edges, rows, noise, vocab, filtered, tile)
    # Tokens that are not listed wait longer than that.
    if (candidates.bounds.low > 0) & (tl.exp(-best) > ROUNDED * candidates.bounds.wait):
        candidates = all_candidates(candidates, vocab)
        token, _ = _drawn(params, candidates, edges, rows, noise, vocab, filtered, tile)
    fine = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(fine, token, 0))
    tl.store(bad + row, tl.where(fine, 0, 1))


@triton.jit
def _drawn(
    params,
    candidates,
    edges,
    rows,
    noise,
    vocab,
    filtered: tl.constexpr,
    tile: tl.constexpr,
):
    """The winning token of a list, and its score."""
    best = float("-inf")
    token = vocab
    for start in range(0, candidates.size, tile):
        ids, inside, depth = listed(candidates, start, tile)
        score = _score(params, depth, rows, noise, ids)
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
    return token, best
