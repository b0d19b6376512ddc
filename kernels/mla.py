"""Attention of DeepSeek's MLA over a paged cache of latents.

Theory. Multi-head latent attention (DeepSeek-V2, 2024) caches one vector a token for all
heads: the normed latent c (512) and one rotated key (64). Head h's key is [W_K[h] c,
rotated key], and its value W_V[h] c. As q . W_K[h] c = (W_K[h]^T q) . c, the two matrices
are absorbed by the query and the output: a step attends over the cache itself, with one
key head, whose values are the first 512 of the 576 numbers of its keys. So a context is
read once, whatever the number of heads.

As in attention.py, a program's rows are (query, head) pairs, flattened, keys are folded
into a running softmax tile by tile, and contexts are cut into ranges of whole tiles. A
tile's latents are loaded once, into shared memory, for both products: as keys, and
transposed as values. Results of ranges are large here (2 KB a head), so another kernel
merges them, in the order of the ranges, with many programs; the last program of a
context, alone, would take longer than the attention.

Arithmetic, in 2 bytes on 132 processors at 4.2 TB/s. A token costs 1,152 bytes a layer,
and 2 * (576 + 512) FLOP a head: for 16 heads 30 FLOP a byte, so a decode step is bound by
memory, 32,768 tokens by 9 us; for 128 heads 242 a byte, at which both limits are near,
and a product at half of its peak takes twice the time of the bytes. 16 rows and tiles of
64 keys (74 KB): while a processor multiplies a tile, the next is being loaded, and needs
25 KB in flight (attention.py). Batch 1, 4,096 tokens: 64 ranges of one tile leave 2 MB of
results, merged by 256 programs.
"""

import torch
import triton
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.attention import LOG2_E, DraftLayout, attention_reference
from minfer.kernels.attention_tunes import MAX_SPLITS, padded
from minfer.kernels.cache_numbers import FP8
from minfer.kernels.mla_kernels import attend_latent, merge_ranges
from minfer.kernels.mla_tunes import (
    MERGE_VALUES,
    LatentTune,
    latent_splits,
    latent_tune,
)
from minfer.kernels.pdl import early
from minfer.kernels.target import capability


def latent_decode(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    contexts: Tensor,
    scale: float,
    *,
    value_dim: int,
    splits: int | None = None,
    out: Tensor | None = None,
    tune: LatentTune | None = None,
) -> Tensor:
    """`latent_attention` of one query per sequence: q [batch, heads, latent + rotated],
    contexts [batch], the tokens each attends to (0 gives zeros). splits: None is
    `latent_splits` of the table's width.
    """
    if splits is None:
        max_context = table.shape[1] * cache.shape[1]
        splits = latent_splits(len(q), q.shape[1], 1, max_context)
    return _attention(
        q,
        cache,
        table,
        rows,
        contexts,
        None,
        None,
        scale,
        value_dim=value_dim,
        max_count=1,
        splits=splits,
        out=out,
        tune=tune,
    )


def latent_attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    offsets: Tensor,
    scale: float,
    *,
    value_dim: int,
    max_count: int,
    splits: int = 1,
    out: Tensor | None = None,
    draft_layout: DraftLayout | None = None,
    tune: LatentTune | None = None,
) -> Tensor:
    """Causal attention of packed chunks over their cached latents; returns `out`
    [tokens, heads, value_dim].

    q [tokens, heads, latent + rotated], any strides but the last: a head's query times
    its absorbed key matrix, then its rotated part; cache [blocks, block_size, latent +
    rotated], any strides but the last, as `write_latent` leaves it, of the dtype of q or
    FP8; value_dim is the size of the latent. All else is as in
    `attention.prefill_attention`: chunk i is the queries
    q[offsets[i] : offsets[i] + counts[i]], at positions starts[i] onwards of the sequence
    in row rows[i] of the table, or drafts to verify that are laid out by draft_layout;
    entries of the table outside a context are never read.

    A draft whose latent is not finite gives NaN for itself and the queries after it.
    Raises ValueError for shapes, strides or types that do not fit together.
    """
    return _attention(
        q,
        cache,
        table,
        rows,
        starts,
        counts,
        offsets,
        scale,
        value_dim=value_dim,
        max_count=max_count,
        splits=splits,
        out=out,
        draft_layout=draft_layout,
        tune=tune,
    )


def _attention(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    *,
    value_dim: int,
    max_count: int,
    splits: int,
    out: Tensor | None,
    draft_layout: DraftLayout | None = None,
    tune: LatentTune | None,
) -> Tensor:
    """Check the arguments, and choose the kernels or the reference. Without counts and
    offsets, chunks are single queries, and starts are contexts.
    """
    if out is None:
        out = torch.empty((*q.shape[:2], value_dim), dtype=q.dtype, device=q.device)
    _check(q, cache, table, out, value_dim, splits)
    if not on_triton(q):
        if counts is None or offsets is None:
            starts, counts = starts - 1, torch.ones_like(starts)
            offsets = torch.arange(len(q), device=q.device)
        keys = cache[:, :, None]
        return attention_reference(
            q,
            keys,
            keys[..., :value_dim],
            table,
            rows,
            starts=starts,
            counts=counts,
            offsets=offsets,
            scale=scale,
            out=out,
            draft_layout=draft_layout,
            max_count=max_count,
        )
    pairs = max_count * q.shape[1]
    _launch(
        q,
        cache,
        table,
        rows,
        starts,
        counts,
        offsets,
        scale,
        out,
        max_count=max_count,
        splits=splits,
        draft_layout=draft_layout,
        tune=tune or latent_tune(q.element_size(), pairs, capability(q.device)),
    )
    return out


def _launch(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor | None,
    offsets: Tensor | None,
    scale: float,
    out: Tensor,
    *,
    max_count: int,
    splits: int,
    draft_layout: DraftLayout | None,
    tune: LatentTune,
) -> None:
    """Run the kernels, with memory for the results of ranges."""
    tokens, heads, latent = out.shape
    # For each range a result [latent], and the logarithm of its sum of exponentials.
    results = tokens * heads * splits if splits > 1 else 0
    partials = torch.empty(results * (latent + 1), dtype=torch.float32, device=q.device)
    queries = {
        "starts": starts,
        "counts": counts,
        "offsets": offsets,
        "splits": splits,
        "skip": draft_layout.skip if draft_layout else 0,
        "stride": draft_layout.stride if draft_layout else 0,
        "max_count": max_count,
        "drafted": draft_layout is not None,
    }
    results_of = {
        "partials": partials,
        "sums": partials[results * latent :],
        "out": out,
        "out_row": out.stride(0),
        "out_head": out.stride(1),
        "heads": heads,
        "latent": latent,
        "launch_pdl": early(q),
    }
    tiles = triton.cdiv(max_count * heads, tune.rows)
    attend_latent[tiles * splits, len(rows)](
        q=q,
        cache=cache,
        table=table,
        rows=rows,
        **queries,
        **results_of,
        scale=scale * LOG2_E,
        q_row=q.stride(0),
        q_head=q.stride(1),
        table_row=table.stride(0),
        stride_block=cache.stride(0),
        stride_token=cache.stride(1),
        split=splits > 1,
        rows_tile=tune.rows,
        block_size=cache.shape[1],
        tile=tune.tile,
        latent_pad=padded(latent),
        rotated=q.shape[2] - latent,
        rotated_pad=padded(q.shape[2] - latent),
        num_warps=tune.warps,
        num_stages=tune.stages,
    )
    if splits > 1:
        splits_pad = triton.next_power_of_2(splits)
        piece = min(MERGE_VALUES // splits_pad, padded(latent))
        merge_ranges[max_count * heads, triton.cdiv(latent, piece), len(rows)](
            **queries, **results_of, piece=piece, splits_pad=splits_pad, num_warps=4
        )


def _check(
    q: Tensor, cache: Tensor, table: Tensor, out: Tensor, value_dim: int, splits: int
) -> None:
    """Raise ValueError if the arguments of a call do not fit together; reads no
    contents.
    """
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits is {splits}, not from 1 to {MAX_SPLITS}")
    if q.dim() != 3 or cache.dim() != 3 or table.dim() != 2:
        raise ValueError("q and the cache are 3-dimensional, a table 2-dimensional")
    if not 0 < value_dim < q.shape[2] == cache.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)} and values of {value_dim} do not fit a cache of "
            f"{tuple(cache.shape)}"
        )
    dtypes_match = cache.dtype in (q.dtype, FP8) and q.dtype == out.dtype
    if out.shape != (*q.shape[:2], value_dim) or not dtypes_match:
        raise ValueError(
            f"q is {q.dtype}, the cache {cache.dtype}, out {out.dtype}, "
            f"{tuple(out.shape)}; they have one type, or the cache is FP8, and out has "
            f"the shape {(*q.shape[:2], value_dim)}"
        )
    if any(t.stride(-1) != 1 for t in (q, cache, table, out)):
        raise ValueError(
            "the last dimension of q, cache, table and out must be contiguous"
        )
