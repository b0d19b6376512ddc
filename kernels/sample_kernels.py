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
    DEPTH_MARGIN,
    MASS_UNITS,
    MASSES,
    DepthBounds,
    depth_of,
    floor_of,
    guess_bounds,
    load_bounds,
    max_kept_depth,
    max_tokens_within,
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
    find_edges,
    is_kept,
    load_candidates,
    typical_of,
)

WAITING_TIME_MARGIN = tl.constexpr(0.9999)  # of waiting times of tokens
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
    num_chunks,
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
    chunk_index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, filtered
    )
    ids = first + chunk_index * chunk + tl.arange(0, chunk)
    line = logits + row * stride - first
    x = tl.load(line + ids, mask=ids < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN: also broken
    x = tl.reshape(x, [chunk // group, group])
    top = tl.max(x, 1)
    floor = tl.maximum(top, LOWEST)
    group_index = (row * num_chunks + chunk_index) * (chunk // group) + tl.arange(
        0, chunk // group
    )
    tl.store(tops + group_index, top)
    tl.store(
        counts + row, tl.where(params.restricted, 0, num_chunks), mask=chunk_index == 0
    )
    if params.restricted:
        tl.store(
            sums + group_index,
            tl.sum(tl.exp((x - floor[:, None]) / params.temperature), 1),
        )
        if params.typical_p < 1:
            below = (floor[:, None] - x) / params.temperature
            share = tl.where(below < DEEPEST_BOUND, below * tl.exp(-below), 0.0)
            tl.store(moments + group_index, tl.sum(share, 1))
    else:
        score = tl.max(floor, 0) - tl.reshape(x, [chunk])
        if not params.greedy:
            times = waiting(rows, streams, positions, row, ids)
            score = times * tl.exp(score / params.temperature)
        lowest = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        tl.store(lists + row * width + chunk_index, lowest)
        if divided:
            # A chunk behind the vocabulary has no winner.
            chunk_offset = lowest - first - chunk_index * chunk
            has_winner = (chunk_offset >= 0) & (chunk_offset < chunk) & (lowest < vocab)
            winner_logit = tl.load(line + lowest, mask=has_winner, other=float("-inf"))
            tl.store(values + row * width + chunk_index, winner_logit.to(tl.float32))


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
    num_chunks,
    vocab,
    out,
    bad,
    pad: tl.constexpr,
):
    """Grid [rows]: what `finish` does for rows that are not filtered, from the chunks of
    all ranks: tops, values and lists are [rows, num_chunks], as of `scan`.
    """
    follow()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, pad)
    mask = lanes < num_chunks
    params = row_params(
        rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, False
    )
    top = tl.load(tops + row * num_chunks + lanes, mask=mask, other=float("-inf"))
    largest = tl.max(top, 0)
    x = tl.load(values + row * num_chunks + lanes, mask=mask, other=float("-inf"))
    ids = tl.load(lists + row * num_chunks + lanes, mask=mask, other=vocab)
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
    max_unguessed: tl.constexpr,
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
        limit = max_kept_depth(params, depth, mass, total, group)
        mean = 0.0
        if only_typical_p(params):
            # The depth of a group without mass is not read: it may be infinite.
            moment = tl.load(
                moments + row * groups + lanes, mask=lanes < groups, other=0.0
            )
            moment = tl.where(mass > 0, moment * tl.exp(-depth) + mass * depth, 0.0)
            mean = tl.sum(moment, 0) / total
            limit = tl.maximum(limit, 2 * DEPTH_MARGIN * mean)
        low, high = 0.0, float("inf")
        kept_mass = 1.0  # mass of surely kept tokens: of the largest logit
        if only_min_p(params):  # all within are surely kept
            low = float("inf")
            kept_mass = tl.sum(tl.where(depth <= limit, tl.exp(-depth), 0.0), 0)
        has_quantile = ((params.top_k > 0) | (params.top_p < 1)) & (params.typical_p >= 1)
        if has_quantile & (max_tokens_within(depth, mass, limit, group) > max_unguessed):
            line = logits + row * stride
            low, high, kept_mass = guess_bounds(
                params, line, largest, total, limit, vocab, samples
            )
        lowered = tl.where(high < limit, 1.0, 0.0)
        guess = tl.minimum(limit, high)
        # What top-p keeps depends on the mass of all that min-p keeps.
        needed = tl.where(params.deepest < float("inf"), limit, guess)
        floor = floor_of(largest, needed, params.temperature)
        row_bounds = DepthBounds(
            largest, total, mean, guess, low, lowered, waits / kept_mass, floor
        )
        store_bounds(bounds + row * BOUND_WORDS, row_bounds)
        mass_lanes = tl.arange(0, MASSES)
        tl.store(masses + row * MASSES + mass_lanes, tl.zeros([MASSES], tl.int64))
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
    chunk_index = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    row_bounds = load_bounds(bounds + row * BOUND_WORDS)
    group_index = chunk_index * (chunk // group) + tl.arange(0, chunk // group)
    # The last span may end after the last chunk.
    group_tops = tl.load(
        tops + row * groups + group_index, mask=group_index < groups, other=float("-inf")
    )
    top = tl.max(group_tops, 0)
    if top >= row_bounds.floor:
        params = row_params(
            rows, temperatures, top_ks, top_ps, deepests, typical_ps, row, vocab, True
        )
        line = logits + row * stride
        min_depth = depth_of(top, row_bounds.largest, params.temperature)
        guessed = (params.top_p < 1) & (row_bounds.low + row_bounds.lowered > 0)
        weighed = guessed & (params.deepest < float("inf"))
        sure = tl.zeros([block], tl.float32)
        min_p_masses = tl.zeros([block], tl.float32)
        for start in range(chunk_index * chunk, chunk_index * chunk + chunk, block):
            ids = start + tl.arange(0, block)
            x = tl.load(line + ids, mask=ids < vocab, other=float("-inf"))
            depth = depth_of(x, row_bounds.largest, params.temperature)
            depth = tl.where(ids < vocab, depth, float("nan"))
            keep = (depth <= row_bounds.limit) & (depth >= row_bounds.low)
            if weighed:
                min_p_masses += tl.where(depth <= params.deepest, tl.exp(-depth), 0.0)
            if min_depth < row_bounds.low:
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
            _add(masses + row * MASSES + 1, min_p_masses)
        if min_depth < row_bounds.low:
            _add(masses + row * MASSES, sure)


@triton.jit
def _append(line, count, ids, keep):
    """Append to a list, in an order that is a race."""
    keep = keep.to(tl.int32)
    num_kept = tl.sum(keep, 0)
    if num_kept > 0:
        base = tl.atomic_add(count, num_kept, sem="relaxed")
        tl.store(line + base + tl.cumsum(keep, 0) - 1, ids, mask=keep > 0)


@triton.jit
def _add(pointer, mass):
    """Add up masses as integers, so that the order of programs does not matter."""
    tl.atomic_add(pointer, (tl.sum(mass, 0) * MASS_UNITS).to(tl.int64), sem="relaxed")


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
    max_id = tl.full([], 0xFFFFFFFF, tl.uint32)
    infinite = tl.full([], float("inf"), tl.float32)
    edges = Edges(infinite, max_id, none, infinite, max_id)
    if params.restricted:
        row_bounds = load_bounds(bounds + row * BOUND_WORDS)
        sure = tl.load(masses + row * MASSES)
        min_p_mass = tl.load(masses + row * MASSES + 1)
        candidates = CandidateList(
            line, lists + row * width, size, a_list, row_bounds, params.temperature
        )
        edges, candidates = find_edges(
            params, candidates, sure, min_p_mass, vocab, width, tile
        )
        edges = Edges(edges.depth, edges.last, none, infinite, max_id)
        if params.typical_p < 1:
            edges = typical_of(params, candidates, edges, tile)
    noise = streams, positions, row
    token, best = _sample_list(
        params, candidates, edges, rows, noise, vocab, filtered, tile
    )
    # Tokens that are not listed wait longer than that.
    if (candidates.bounds.low > 0) & (
        tl.exp(-best) > WAITING_TIME_MARGIN * candidates.bounds.wait
    ):
        candidates = all_candidates(candidates, vocab)
        token, _ = _sample_list(
            params, candidates, edges, rows, noise, vocab, filtered, tile
        )
    fine = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(fine, token, 0))
    tl.store(bad + row, tl.where(fine, 0, 1))


@triton.jit
def _sample_list(
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
        ids, mask, depth = load_candidates(candidates, start, tile)
        score = _score(params, depth, rows, noise, ids)
        allowed = is_kept(edges, ids, mask, depth)
        if filtered:
            distance = tl.abs(depth - edges.mean)
            at_edge = (distance == edges.distance) & (
                ids.to(tl.uint32) <= edges.last_typical
            )
            allowed &= (distance < edges.distance) | at_edge
        score = tl.where(allowed, score, float("-inf"))
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, ids, vocab), 0)
        token = tl.where((high > best) | ((high == best) & (first < token)), first, token)
        best = tl.maximum(best, high)
    return token, best
