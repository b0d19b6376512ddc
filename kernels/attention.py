"""Attention over the paged KV cache: of one new token per sequence, and of prefill
chunks.

Theory. Softmax is associative (Milakov and Gimelshein 2018): parts of a context, each
given by its maximum, its sum of exponentials and its weighted values, merge into the
whole. So keys are read tile by tile, through the block table, and are folded into a
running softmax (FlashAttention-2, Dao 2023). A program's rows are (query, query head of
one key head) pairs, flattened: heads that share a key head share every loaded tile, and a
tile of 128 rows spans few positions, so few causally masked keys are multiplied in vain.
Decode is a chunk of one token: its rows are padded to the 16 of the tensor cores, as its
time is bytes / bandwidth.

A decode step must keep enough bytes in flight, so a context is cut into `splits` ranges
with a program each (Flash-Decoding, Dao et al. 2023). Each program stores its result in
memory and increments a count; the last one merges all results, in the order of the
ranges. Ranges are whole tiles at absolute positions: a token's result depends on its
context and on `splits`, never on other rows or on which program was last. Grids follow
from shapes alone: a program finds its range when it runs, and one without a range
returns. The last one sets the count to zero again, so calls can be captured in a CUDA
graph; they must not overlap on several streams, as all use the same counts.

Arithmetic, for 28 query heads over 4 key heads of 128 dimensions in 2 bytes (a 7B model),
on 132 processors at 4.2 TB/s. A token costs 2 * 4 * 128 * 2 = 2,048 bytes a layer. A
latency near 0.8 us needs 4.2e12 * 0.8e-6 = 3.4 MB in flight, 25 KB for each processor. A
tile of 64 tokens of one key head is 16 KB of keys and as much of values; with 3 stages
the next tile is always being loaded and the one after it most of the time, 32 to 64 KB
for a program that takes 70 KB of shared memory: three fit in a processor's 227 KB. Batch
1: 132 / 4 = 33 splits. 4,096 tokens are 8.4 MB (2.0 us at full bandwidth), two tiles for
each program: a launch, dependent loads and the merge take most of the time, 10 us. 32,768
tokens are 67 MB (16 us), 16 tiles for each range. Batch 64: 256 programs of one split,
and nothing is merged. Chunks: 64 keys against 128 rows are 4.2 MFLOP for 32 KB, 128 FLOP
a byte: at 600 TFLOP/s, 4.7 TB/s from the L2 cache. 128 rows of 128 sums in 8 warps take
64 registers of a thread.

Drafts to verify are such chunks, of a row's last token and of its drafts, which are not
consecutive among the packed tokens (`DraftLayout`): their queries share every loaded
tile, while as separate rows they would load a context once for each.

With sink tokens, keys of the beginning that are before a row's window are folded first,
by the first range: a scan of its own with a bound for each row, so that no key counts
twice.

Exponentials are to base 2 (log2 e is part of the scale), as the hardware computes them.
Capped scores (Gemma 2) are cap * tanh(score / cap): queries times keys are multiplied by
scale / cap before the tanh, and by cap, with log2 e, after it.
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.attention_kernels import attend
from minfer.kernels.attention_tunes import (
    MAX_SPLITS,
    MERGE_VALUES,
    DecodeTune,
    PrefillTune,
    decode_tune,
    head_size_of,
    num_splits,
    padded,
    prefill_tune,
    table_dim,
)
from minfer.kernels.cache_numbers import FP8, INT8, CacheScales, as_bytes, dequantize
from minfer.kernels.pdl import arrivals, early
from minfer.kernels.target import capability

LOG2_E = math.log2(math.e)
THREADS = 32  # of a warp


class DraftLayout(NamedTuple):
    """The layout of queries of chunks that are not consecutive: query j > 0 of chunk i is
    q[offsets[i] + skip + (j - 1) * stride].
    """

    skip: int
    stride: int


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    rows: Tensor,
    contexts: Tensor,
    scale: float,
    *,
    window: int = 0,
    chunked: bool = False,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    scales: CacheScales | None = None,
    cap: float | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    tune: DecodeTune | None = None,
) -> Tensor:
    """Attention of one query per sequence over its cached context; returns `out`, as q in
    shape.

    q [batch, heads, head_dim], any strides but the last; k_cache and v_cache [blocks,
    block_size, kv_heads, head_dim], the query's own key and value already written; table
    [max_rows, max_blocks] int32, of which sequence i uses row rows[i]; contexts [batch],
    the tokens each attends to (0 gives zeros). window > 0: only the last `window` of
    them, and the first `sink_tokens` of the sequence; with `chunked`, those in its own
    chunk of `window` positions (then without sink_tokens). Table entries outside are
    never read. scale > 0 multiplies the scores. sinks [heads] float32 (gpt-oss' attention
    sinks): one more logit of each head, whose weight goes to no value. cap > 0: scores
    are cap * tanh(score / cap). Caches are of the dtype of q or of 8 bits
    (cache_numbers.py): FP8, or INT8 with its scales.

    splits: ranges that each context is cut into, at most `MAX_SPLITS`; None is
    `num_splits` of the table's width. tune: instead of the table's (attention_tunes.py).
    Raises ValueError for shapes, strides or types that do not fit together.
    """
    _check(q, k_cache, v_cache, table, out, scales)
    if not on_triton(q):
        return attention_reference(
            q,
            k_cache,
            v_cache,
            table,
            rows,
            starts=contexts - 1,
            counts=torch.ones_like(contexts),
            offsets=torch.arange(len(q), device=q.device),
            scale=scale,
            window=window,
            chunked=chunked,
            sink_tokens=sink_tokens,
            sinks=sinks,
            scales=scales,
            cap=cap,
            out=out,
        )
    block_size, kv_heads, dim = k_cache.shape[1:]
    if splits is None:
        splits = num_splits(len(q), kv_heads, dim, table.shape[1] * block_size)
    tune = tune or decode_tune(head_size_of(q, k_cache), len(q) * kv_heads, splits)
    return _launch(
        q,
        k_cache,
        v_cache,
        table,
        rows=rows,
        starts=contexts,
        counts=None,
        offsets=None,
        scale=scale,
        window=window,
        chunked=chunked,
        sink_tokens=sink_tokens,
        sinks=sinks,
        scales=scales,
        cap=cap,
        max_count=1,
        splits=splits,
        out=out,
        rows_tile=padded(q.shape[1] // kv_heads),
        tile=tune.tile,
        warps=tune.warps,
        stages=tune.stages,
    )


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    offsets: Tensor,
    scale: float,
    *,
    window: int = 0,
    chunked: bool = False,
    sink_tokens: int = 0,
    sinks: Tensor | None = None,
    scales: CacheScales | None = None,
    cap: float | None = None,
    max_count: int,
    splits: int = 1,
    out: Tensor | None = None,
    draft_layout: DraftLayout | None = None,
    tune: PrefillTune | None = None,
) -> Tensor:
    """Causal attention of packed chunks over their cached contexts; returns `out`, with
    the shape of q.

    Chunk i is the queries q[offsets[i] : offsets[i] + counts[i]], at positions starts[i]
    onwards of the sequence in row rows[i] of the table; their own keys and values are
    already in the cache. rows, starts, counts and offsets are [chunks] int32 or int64. No
    count may be above max_count, which sets the grid and, for few rows, their tile. For
    chunks of count 0 and tokens of no chunk `out` is not written. The rest is as in
    `decode_attention`; splits are for few short chunks of long contexts. tune: instead of
    the table's.

    draft_layout: the layout of the queries of each chunk (drafts to verify); each chunk
    must have room for max_count, no count is 0, and after its count `out` gets finite
    values.
    """
    _check(q, k_cache, v_cache, table, out, scales)
    if not on_triton(q):
        return attention_reference(
            q,
            k_cache,
            v_cache,
            table,
            rows,
            starts=starts,
            counts=counts,
            offsets=offsets,
            scale=scale,
            window=window,
            chunked=chunked,
            sink_tokens=sink_tokens,
            sinks=sinks,
            scales=scales,
            cap=cap,
            out=out,
            draft_layout=draft_layout,
            max_count=max_count,
        )
    tune = tune or prefill_tune(head_size_of(q, k_cache), capability(q.device))
    rows_tile = min(tune.rows, padded(max_count * q.shape[1] // k_cache.shape[2]))
    return _launch(
        q,
        k_cache,
        v_cache,
        table,
        rows=rows,
        starts=starts,
        counts=counts,
        offsets=offsets,
        scale=scale,
        window=window,
        chunked=chunked,
        sink_tokens=sink_tokens,
        sinks=sinks,
        scales=scales,
        cap=cap,
        max_count=max_count,
        splits=splits,
        out=out,
        draft_layout=draft_layout,
        rows_tile=rows_tile,
        tile=tune.tile,
        warps=tune.warps(rows_tile),
        stages=tune.stages,
    )


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    *,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    window: int,
    chunked: bool,
    sink_tokens: int,
    sinks: Tensor | None,
    scales: CacheScales | None,
    cap: float | None,
    max_count: int,
    splits: int,
    out: Tensor | None,
    rows_tile: int,
    tile: int,
    warps: int,
    stages: int,
    draft_layout: DraftLayout | None = None,
) -> Tensor:
    """Run the kernel, with memory for the results of its ranges."""
    tokens, heads, dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is {splits}, not from 1 to {MAX_SPLITS}")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    tiles = triton.cdiv(max_count * group, rows_tile)
    dim_pad = padded(dim)
    # Contexts of one range are not merged: their kernels need not differ in the settings
    # of merging.
    merge_rows = rows_tile
    if splits > 1:
        merge_rows = min(rows_tile, triton.next_power_of_2(max_count * group))
    at_once = MERGE_VALUES[table_dim(dim)] * THREADS * warps
    # For each range a result [dim], and the logarithm of its sum of exponentials.
    results = tokens * heads * splits if splits > 1 else 0
    partials = torch.empty(results * (dim + 1), dtype=torch.float32, device=q.device)
    counters = None
    if splits > 1:
        needed = triton.next_power_of_2(tiles * len(rows) * kv_heads)
        counters = arrivals(q.device, needed)
    attend[tiles * splits, len(rows), kv_heads](
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scales=None if scales is None else scales.keys,
        v_scales=None if scales is None else scales.values,
        table=table,
        rows=rows,
        starts=starts,
        counts=counts,
        offsets=offsets,
        sinks=None if sinks is None else sinks * LOG2_E,
        out=out,
        partials=partials,
        sums=partials[results * dim :],
        arrivals=counters,
        scale=(scale if cap is None else cap) * LOG2_E,
        cap_scale=None if cap is None else scale / cap,
        splits=splits,
        skip=draft_layout.skip if draft_layout else 0,
        stride=draft_layout.stride if draft_layout else 0,
        max_count=max_count,
        q_row=q.stride(0),
        q_head=q.stride(1),
        out_row=out.stride(0),
        out_head=out.stride(1),
        table_row=table.stride(0),
        stride_block=k_cache.stride(0),
        stride_token=k_cache.stride(1),
        stride_head=k_cache.stride(2),
        window=window,
        split=splits > 1,
        group=group,
        rows_tile=rows_tile,
        block_size=block_size,
        tile=tile,
        dim=dim,
        dim_pad=dim_pad,
        merge_rows=merge_rows,
        depth=max(1, at_once // (merge_rows * dim_pad)),
        drafted=draft_layout is not None,
        sink_tokens=sink_tokens if window else 0,
        chunked=chunked,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=early(q),
    )
    return out


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    out: Tensor | None,
    scales: CacheScales | None,
) -> None:
    """Raise ValueError if the tensors of a call do not fit together; reads no
    contents.
    """
    if q.dim() != 3 or k_cache.dim() != 4 or table.dim() != 2:
        raise ValueError(
            f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)} and table "
            f"{tuple(table.shape)} must have 3, 4 and 2 dimensions"
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
        raise ValueError(
            f"k_cache {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)} must "
            f"have the same shape and strides"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit a cache of {tuple(k_cache.shape)}"
        )
    out = q if out is None else out
    dtypes_match = (
        k_cache.dtype in (q.dtype, FP8, INT8) and k_cache.dtype == v_cache.dtype
    )
    if out.shape != q.shape or q.dtype != out.dtype or not dtypes_match:
        raise ValueError(
            f"q is {q.dtype}, caches {k_cache.dtype} and {v_cache.dtype}, out "
            f"{out.dtype}, {tuple(out.shape)}; all must have one dtype, but for caches "
            f"in FP8 or INT8, and out must have the shape {tuple(q.shape)}"
        )
    if any(t.stride(-1) != 1 for t in (q, k_cache, table, out)):
        raise ValueError(
            "the last dimension of q, caches, table and out must be contiguous"
        )
    if (scales is not None) != (k_cache.dtype is INT8):
        raise ValueError(
            f"caches are {k_cache.dtype}; INT8 has scales, other dtypes have none"
        )
    for scale in scales or ():
        if scale.shape != k_cache.shape[:3] or not scale.is_contiguous():
            raise ValueError(
                f"scales of shape {tuple(scale.shape)} must be contiguous, and of shape "
                f"{tuple(k_cache.shape[:3])}"
            )


def attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    offsets: Tensor,
    scale: float,
    window: int = 0,
    out: Tensor | None = None,
    draft_layout: DraftLayout | None = None,
    max_count: int = 0,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    scales: CacheScales | None = None,
    cap: float | None = None,
    chunked: bool = False,
) -> Tensor:
    """`prefill_attention` in plain torch, float32 inside; decode is chunks of one
    token.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    block_size, kv_heads, dim = k_cache.shape[1:]
    chunks = torch.stack([column.long() for column in (rows, starts, counts, offsets)], 1)
    for row, start, count, offset in chunks.tolist():
        first = max(0, start - window + 1) if window else 0
        if chunked:
            first = start // window * window
        sink_positions = torch.arange(min(sink_tokens, first), device=q.device)
        tokens = torch.arange(first, start + count, device=q.device)
        tokens = torch.cat((sink_positions, tokens))
        blocks = table[row, tokens // block_size].long()
        slots = blocks, tokens % block_size
        key, value = (
            dequantize(
                as_bytes(cache)[slots].view(cache.dtype),
                None if scale_of is None else scale_of[slots],
                torch.float32,
            )
            for cache, scale_of in zip(
                (k_cache, v_cache), scales or (None, None), strict=True
            )
        )
        if draft_layout is None:
            query_index = torch.arange(offset, offset + count, device=q.device)
        else:
            later_queries = (
                offset
                + draft_layout.skip
                + draft_layout.stride * torch.arange(max_count - 1)
            )
            all_queries = torch.tensor([offset, *later_queries.tolist()], device=q.device)
            query_index = all_queries[:count]
            out[all_queries[count:]] = 0
            is_draft = (tokens > start)[:, None, None]
            value = value.where(~is_draft | value.isfinite(), 0)
        query = q[query_index].float().view(count, kv_heads, q.shape[1] // kv_heads, dim)
        scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale
        if cap is not None:
            scores = (scores / cap).tanh_() * cap
        positions = torch.arange(start, start + count, device=q.device)[:, None]
        distance = positions - tokens
        unseen = distance < 0
        if chunked:
            unseen |= tokens < positions // window * window
        elif window:
            unseen |= (distance >= window) & (tokens >= sink_tokens)
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            sink_logits = sinks.view(kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink_logits), -1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        result = torch.einsum("hgqk,khd->qhgd", weights, value)
        out[query_index] = result.reshape(count, *out.shape[1:]).to(out)
    return out
