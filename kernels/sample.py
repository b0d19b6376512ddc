"""Drawing tokens on the device: what `minfer.sample` says, for a batch and without a
sort.

Theory. A draw is the largest noise - depth of the kept tokens: depth = (largest logit -
logit) / temperature, noise = -log(E), E hashed from the id. `_scan` names each chunk's
winner, its least E exp(depth) with depth below its own maximum, and `_finish` compares a
row's winners exactly. So only tokens of one chunk may swap, if their scores agree to
1e-6.

Min-p is a depth that may not be exceeded. Top-k and top-p are weighted quantiles of
depth: the least that k tokens do not exceed; the least up to which tokens hold `top_p` of
the mass; then one of the ids at just that depth. Each takes up to 8 passes, 4 bits a
pass, over a list. For this `_scan` stores the largest of every 128 logits and the sum of
their exponentials, and `_gather` bisects for a depth with k groups above, or below which,
at most min(sum, 128 exp(-depth)) a group, less than 1 - top_p is left: it lists the ids
above. A list's order is a race that nothing shows: counts and masses are integers (in
units of 2^-43).

Arithmetic, for 152k bfloat16 logits, 4.2 TB/s, 132 x 128 lanes at 1.7 GHz: a row is 0.3
MB in 75 programs and costs its 2 launches, 3 if filtered; if it is flat, 0.1 ms for each
pass over its list. 256 rows are 78 MB, 19 us to read; noise, where `_scan` makes it, is
75 instructions, 100 us in all.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.pdl import early, follow

SIZES = (
    2048,
    128,
    4096,
    1024,
)  # tokens of: `_scan`'s chunk, a group, `_gather`'s chunk, a pass
WARPS = {"scan": 4, "gather": 8, "finish": 8}
STEPS64 = (
    (30, 0xBF58476D1CE4E5B9),
    (27, 0x94D049BB133111EB),
    (31, 1),
)  # minfer.sample's numbers
STEPS32 = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB), (14, 1))
GOLDEN, LARGEST_V, GREEDY_BELOW = 0x9E3779B97F4A7C15, 1 - 2**-24, 1e-5


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
# Triton's.
def _row(who, heats, top_ks, top_ps, deeps, row, vocab, filtered: tl.constexpr):  # type: ignore[no-untyped-def]
    """Temperature (1 if greedy), k (0: all), p, depth, whether greedy, whether
    restricted.
    """
    owner = tl.load(who + row)
    heat, k, p = tl.load(heats + owner), tl.load(top_ks + owner), tl.load(top_ps + owner)
    greedy, k, deep = (
        heat < 1e-5,
        tl.where((k > 0) & (k < vocab), k, 0),
        tl.load(deeps + owner),
    )
    narrow = filtered & (greedy == 0) & ((k > 0) | (p < 1) | (deep < float("inf")))
    return tl.where(greedy, 1.0, heat), k, p, deep, greedy, narrow


@triton.jit
# Triton's.
def _waiting(who, streams, positions, row, ids):  # type: ignore[no-untyped-def]
    """-log(1 - v): waiting times, whose negative logarithms are the noise."""
    key = tl.load(streams + tl.load(who + row)).to(tl.uint64)
    key += (tl.load(positions + row) + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    x = ids.to(tl.uint32) + key.to(tl.uint32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) ^ (key >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    v = tl.minimum(((x ^ (x >> 14)).to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -(tl.log(1 - v) + ((1 - (1 - v)) - v))  # the second term is what 1 - v lost


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _scan(  # type: ignore[no-untyped-def]  # Triton's
    logits,
    stride,
    who,
    heats,
    top_ks,
    top_ps,
    deeps,
    streams,
    positions,
    tops,
    sums,
    lists,
    counts,
    width,
    vocab,
    parts,
    filtered: tl.constexpr,
    chunk: tl.constexpr,
    group: tl.constexpr,
):
    follow()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heat, _, _, _, greedy, narrow = _row(
        who, heats, top_ks, top_ps, deeps, row, vocab, filtered
    )
    ids = part * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(
        tl.float32
    )
    x = tl.reshape(
        tl.where(x == x, x, float("inf")), [chunk // group, group]
    )  # NaN: as bad
    top = tl.max(x, 1)
    floor = tl.maximum(top, -3.4028234663852886e38)  # finite: -inf - -inf would be NaN
    here = (row * parts + part) * (chunk // group) + tl.arange(0, chunk // group)
    tl.store(tops + here, top)
    tl.store(counts + row, tl.where(narrow, 0, parts), mask=part == 0)
    if narrow:
        tl.store(sums + here, tl.sum(tl.exp((x - floor[:, None]) / heat), 1))
    else:
        score = tl.max(floor, 0) - tl.reshape(x, [chunk])
        if not greedy:
            score = _waiting(who, streams, positions, row, ids) * tl.exp(score / heat)
        lowest = tl.min(tl.where(score == tl.min(score, 0), ids, vocab - 1), 0)
        tl.store(lists + row * width + part, lowest)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _gather(  # type: ignore[no-untyped-def]  # Triton's
    logits,
    stride,
    who,
    heats,
    top_ks,
    top_ps,
    deeps,
    tops,
    sums,
    totals,
    lists,
    counts,
    width,
    vocab,
    groups,
    chunk: tl.constexpr,
    group: tl.constexpr,
    pad: tl.constexpr,
):
    follow()
    part, row, lanes = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, pad)
    heat, k, p, deep, _, narrow = _row(
        who, heats, top_ks, top_ps, deeps, row, vocab, True
    )
    if narrow:
        top = tl.load(
            tops + row * groups + lanes, mask=lanes < groups, other=float("-inf")
        )
        largest = tl.max(top, 0)
        depth = tl.div_rn(largest - top, heat)
        mass = tl.load(
            sums + row * groups + lanes, mask=lanes < groups, other=0.0
        ) * tl.exp(-depth)
        total, less, more = tl.sum(mass, 0), 0.0, 128.0
        tl.store(totals + row, total, mask=part == 0)
        for _step in range(12):
            limit = (less + more) / 2
            light = (
                tl.sum(tl.minimum(mass, group * tl.exp(-limit)), 0)
                < 0.999 * (1 - p) * total
            )
            enough = tl.where(k > 0, tl.sum((depth <= limit).to(tl.int32), 0) >= k, light)
            less, more = tl.where(enough, less, limit), tl.where(enough, limit, more)
        # None found: all. What top-p keeps depends on the mass of all that min-p leaves.
        found = (more < 128) & ((k > 0) | (deep == float("inf")))
        more = tl.minimum(tl.where(found, more, float("inf")), deep)
        ids = part * chunk + tl.arange(0, chunk)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        keep = ((ids < vocab) & (tl.div_rn(largest - x.to(tl.float32), heat) <= more)).to(
            tl.int32
        )
        base = tl.atomic_add(counts + row, tl.sum(keep, 0), sem="relaxed")
        tl.store(lists + row * width + base + tl.cumsum(keep, 0) - 1, ids, mask=keep > 0)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _listed(line, start, tile: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's
    """Ids of a row's list, whether they are there, and their depth, which is never -0."""
    logits, listed, count, largest, heat = line
    inside = start + tl.arange(0, tile) < count
    ids = tl.load(listed + start + tl.arange(0, tile), mask=inside, other=0)
    x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return ids, inside, tl.abs(tl.div_rn(largest - x, heat))


@triton.jit
def _mass(depth, edge):  # type: ignore[no-untyped-def]  # Triton's
    return tl.where(depth <= edge, (tl.exp(-depth) * 2.0**43).to(tl.int64), 0)


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
# Triton's.
def _quantile(line, edge, target, kind: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """The least key up to which tokens weigh `target` > 0, and the weight before it."""
    base, before = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64)
    for level in range(3 * (kind == 2), 8):  # ids have 20 bits
        steps, sums = (
            (tl.arange(0, 16) << (28 - 4 * level)).to(tl.uint32),
            tl.zeros([16], tl.int64),
        )
        for start in range(0, line[2], tile):
            ids, inside, depth = _listed(line, start, tile)
            key, weight = depth.to(tl.uint32, bitcast=True), inside.to(tl.int64)
            if kind == 1:  # masses, up to the edge
                weight = _mass(depth, edge)
            if kind == 2:  # ids, at the edge
                key, weight = ids.to(tl.uint32), (inside & (depth == edge)).to(tl.int64)
            sums += tl.sum(
                tl.where(key[None, :] < (base + steps)[:, None], weight[None, :], 0), 1
            )
        base += tl.max(tl.where(sums < target, steps, 0), 0)
        before = tl.max(tl.where(sums < target, sums, 0), 0)
    return base, before


@triton.jit  # type: ignore[untyped-decorator]  # Triton ships no types
def _finish(  # type: ignore[no-untyped-def]  # Triton's
    logits,
    stride,
    who,
    heats,
    top_ks,
    top_ps,
    deeps,
    streams,
    positions,
    tops,
    totals,
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
    follow()
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, pad)
    heat, k, p, deep, greedy, narrow = _row(
        who, heats, top_ks, top_ps, deeps, row, vocab, filtered
    )
    top = tl.load(tops + row * groups + lanes, mask=lanes < groups, other=float("-inf"))
    largest, count = tl.max(top, 0), tl.load(counts + row)
    line = (logits + row * stride, lists + row * width, count, largest, heat)
    edge, last = float("inf"), tl.full([], 0xFFFFFFFF, tl.uint32)
    if narrow:
        total = tl.load(totals + row).to(tl.float64) * 2.0**43
        if k > 0:
            key = tl.minimum(
                _quantile(line, edge, k, 0, tile)[0], 0x7F800000
            )  # fewer: all
            edge = key.to(tl.float32, bitcast=True)
        edge = tl.minimum(edge, deep)
        if p < 1:
            if edge < float("inf"):
                held = tl.full([], 0, tl.int64)
                for start in range(0, count, tile):
                    held += tl.sum(_mass(_listed(line, start, tile)[2], edge), 0)
                total = held.to(tl.float64)
            target = tl.maximum(tl.ceil(p.to(tl.float64) * total).to(tl.int64), 1)
            key, before = _quantile(line, edge, target, 1, tile)
            edge = tl.minimum(key, 0x7F800000).to(tl.float32, bitcast=True)
            share = tl.maximum((tl.exp(-edge) * 2.0**43).to(tl.int64), 1)
            last = _quantile(line, edge, (target - before + share - 1) // share, 2, tile)[
                0
            ]
    best, token = float("-inf"), vocab
    for start in range(0, count, tile):
        ids, inside, depth = _listed(line, start, tile)
        score = -depth - tl.where(
            greedy, 0.0, tl.log(_waiting(who, streams, positions, row, ids))
        )
        kept = inside & ((depth < edge) | ((depth == edge) & (ids.to(tl.uint32) <= last)))
        score = tl.where(kept, score, float("-inf"))
        high = tl.max(score, 0)
        first = tl.min(tl.where(score == high, ids, vocab), 0)
        token = tl.where((high > best) | ((high == best) & (first < token)), first, token)
        best = tl.maximum(best, high)
    fine = tl.abs(largest) < float("inf")
    tl.store(out + row, tl.where(fine, token, 0))
    tl.store(bad + row, tl.where(fine, 0, 1))


def sample(
    logits: Tensor,
    who: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    deepest: Tensor,
    streams: Tensor,
    positions: Tensor,
    *,
    filtered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Draw a token a row: (tokens [rows] int32, broken [rows] int32).

    `logits` [rows, vocab], rows contiguous, `positions` [rows] of the tokens drawn. Row i
    samples as device row who[i] does: [device rows] each, `temperature` float32, `top_k`
    int32 (0: all), `top_p` float32 (1: all), `deepest` float32 (-log of min-p; inf: all),
    `streams` int64 (of `minfer.sample.stream`). `filtered` False promises that no row has
    any of the three. Broken (1, token 0) are rows with NaN, +inf or nothing but -inf.
    Raises ValueError for more than 2^20 logits in a row.
    """
    rows, vocab = logits.shape
    if vocab > 1 << 20:
        raise ValueError(
            f"{vocab} logits in a row: sampling adds up masses of {1 << 20} at most"
        )
    asked = (who, temperature, top_k, top_p, deepest, streams, positions)
    if not on_triton(logits):
        return reference(logits, *asked)
    (chunk, group, span, tile), parts = SIZES, triton.cdiv(vocab, SIZES[0])
    group, width = (group, vocab) if filtered else (chunk, parts)
    pad = triton.next_power_of_2(groups := parts * chunk // group)
    tops, sums, totals = logits.new_empty(3, rows, groups, dtype=torch.float32)
    counts, bad, out = who.new_empty(3, -(-rows // 4) * 4)[
        :, :rows
    ]  # aligned: compiled once
    lists = who.new_empty(rows, width)
    line, lots = (logits, logits.stride(0), *asked), (lists, counts, width, vocab)
    first, how = (*lots, parts, filtered, chunk, group), early(logits)
    _scan[parts, rows](*line, tops, sums, *first, num_warps=WARPS["scan"], launch_pdl=how)
    if filtered:
        grid, more = (
            (triton.cdiv(vocab, span), rows),
            (totals, *lots, groups, span, group, pad),
        )
        _gather[grid](
            *line[:7], tops, sums, *more, num_warps=WARPS["gather"], launch_pdl=how
        )
    rest = (*lots, out, bad, groups, filtered, pad, tile)
    _finish[rows,](*line, tops, totals, *rest, num_warps=WARPS["finish"], launch_pdl=how)
    return out, bad


def reference(logits: Tensor, who: Tensor, *of: Tensor) -> tuple[Tensor, Tensor]:
    """`sample` in plain torch, by sorting; `of` are its other six tensors."""
    temperature, top_k, top_p, deepest, streams = (x[who.long(), None] for x in of[:-1])
    positions = of[-1][:, None].long()
    x, vocab = (
        logits.float().nan_to_num(torch.inf, torch.inf, -torch.inf),
        logits.shape[1],
    )
    largest, greedy = x.amax(1, True), temperature < GREEDY_BELOW
    depth, ids = ((largest - x) / temperature.where(~greedy, 1)).sort(stable=True)
    edge = depth.gather(1, top_k.long().where((top_k > 0) & (top_k < vocab), vocab) - 1)
    kept = depth <= edge.minimum(deepest)
    held = ((-depth).double().exp() * kept).cumsum(1)
    kept &= (F.pad(held[:, :-1], (1, 0)) < top_p.double() * held[:, -1:]) | (top_p >= 1)
    key = streams + (positions + 1) * (GOLDEN - 2**64)  # int64 wraps
    for shift, factor in STEPS64:
        key = (key ^ (key >> shift & 2 ** (64 - shift) - 1)) * (
            factor - 2**64 * (factor > 1)
        )
    bits = (ids + key) & 0xFFFFFFFF
    for i, (shift, factor) in enumerate(STEPS32):
        bits = ((bits ^ bits >> shift) * factor ^ (key >> 32) * (i == 0)) & 0xFFFFFFFF
    waiting = -(-((bits.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_V)).log1p()
    score = (-depth - waiting.log() * ~greedy).where(kept | greedy, -torch.inf)
    tokens = ids.where(score == score.amax(1, True), vocab).amin(1, True)
    fine = largest.abs() < torch.inf
    return tokens.where(fine, 0)[:, 0].int(), (~fine)[:, 0].int()
