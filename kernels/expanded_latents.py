"""Attention of long chunks over MLA's latents, expanded to keys and values a piece at a
time.

Theory. Absorbed attention (mla.py) multiplies 576 + 512 numbers for each query, key and
head; expanded keys and values have 192 + 128, less than a third, and expanding a latent
costs a head as much as the products of 171 queries that this saves: 2 * 512 * (128 + 128)
/ (2 * (576 + 512 - 192 - 128)). So long chunks expand latents. Not all at once, as those
of a long context need many times the memory of the latents themselves: first the chunk's
own, then its history's, in pieces of bounded size, a few heads at a time. A piece's
result is a softmax over the piece alone, with the logarithm of its sum of exponentials,
by which the pieces are merged (Flash-Decoding's merging, Dao et al. 2023).

A piece is a run of all chunks' histories, one after the other. Where it begins and ends
in each of them is computed on the device; how many pieces there are the host knows from
the plan. Only the keys of a chunk's own range are loaded: what another sequence left
beside it may not be finite.

A key is the expansion of its latent, and the rotated part that all heads share: the
kernel reads the two where they are, as two products of one score.
"""

import math
from itertools import pairwise

import torch
import triton
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.attention import LOG2_E
from minfer.kernels.attention_tunes import padded
from minfer.kernels.expanded_latents_kernels import attend_piece, merge_pieces
from minfer.kernels.mla_tunes import expanded_tune
from minfer.kernels.target import capability

MERGED_VALUES = 1024  # values of a program that merges


def piece_attention(
    q: Tensor,
    expanded: Tensor,
    rotated: Tensor,
    q_bounds: Tensor,
    bounds: Tensor,
    scale: float,
    *,
    longest: int,
    causal: bool,
    out: Tensor,
    sums: Tensor,
) -> None:
    """Attention of packed chunks over a piece of their contexts, into `out` [tokens,
    heads, value_dim], and the logarithm of each softmax's sum into `sums` [tokens, heads]
    float32: -inf, and zeros in `out`, where a query sees no key.

    q [tokens, heads, plain + rope], rotated already; expanded [keys, heads, plain +
    value_dim]; rotated [keys, rope]: all with any strides but the last. Chunk i is the
    queries from q_bounds[i] to q_bounds[i + 1], at most `longest`, and its keys those
    from bounds[i] to bounds[i + 1], both int32. `causal`: its last query sees all of
    them, and each before it one less; else all queries see all keys. Tokens of no chunk
    are not written.
    """
    if not on_triton(q):
        piece_reference(q, expanded, rotated, q_bounds, bounds, scale, causal, out, sums)
        return
    plain, value_dim = q.shape[2] - rotated.shape[1], out.shape[2]
    tune = expanded_tune(q.element_size(), capability(q.device))
    rows_tile = min(tune.rows, padded(longest))
    attend_piece[triton.cdiv(longest, rows_tile), len(bounds) - 1, q.shape[1]](
        q=q,
        expanded=expanded,
        rotated=rotated,
        q_bounds=q_bounds,
        bounds=bounds,
        out=out,
        sums=sums,
        scale=scale * LOG2_E,
        q_row=q.stride(0),
        q_head=q.stride(1),
        key_row=expanded.stride(0),
        key_head=expanded.stride(1),
        rotated_row=rotated.stride(0),
        out_row=out.stride(0),
        out_head=out.stride(1),
        sums_row=sums.stride(0),
        sums_head=sums.stride(1),
        causal=causal,
        rows_tile=rows_tile,
        tile=tune.tile,
        plain=plain,
        plain_pad=padded(plain),
        rope=rotated.shape[1],
        rope_pad=padded(rotated.shape[1]),
        value_dim=value_dim,
        value_pad=padded(value_dim),
        num_warps=tune.warps(rows_tile),
        num_stages=tune.stages,
    )


def piece_reference(
    q: Tensor,
    expanded: Tensor,
    rotated: Tensor,
    q_bounds: Tensor,
    bounds: Tensor,
    scale: float,
    causal: bool,
    out: Tensor,
    sums: Tensor,
) -> None:
    """`piece_attention` in plain torch, float32 inside."""
    plain = q.shape[2] - rotated.shape[1]
    ends = zip(q_bounds.tolist(), bounds.tolist(), strict=True)
    for (first, begin), (last, end) in pairwise(ends):
        queries, rows = q[first:last].float(), expanded[begin:end].float()
        scores = torch.einsum("qhd,khd->qhk", queries[..., :plain], rows[..., :plain])
        rotated_keys = rotated[begin:end].float()
        scores += torch.einsum("qhd,kd->qhk", queries[..., plain:], rotated_keys)
        scores *= scale
        if causal:
            key = torch.arange(end - begin, device=q.device)
            last_visible = (
                torch.arange(last - first, device=q.device) + len(key) - last + first
            )
            scores.masked_fill_((key > last_visible[:, None])[:, None], -math.inf)
        logs = scores.logsumexp(-1)
        shares = torch.exp(scores - logs[..., None].clamp(min=-1e30))
        out[first:last] = torch.einsum("qhk,khv->qhv", shares, rows[..., plain:])
        sums[first:last] = logs


def merge_piece(total: Tensor, sums: Tensor, piece: Tensor, piece_sums: Tensor) -> None:
    """Merge a piece's result into that of other pieces, in place.

    total [tokens, heads, value_dim] float32 and sums [tokens, heads] float32, contiguous;
    piece and piece_sums as `piece_attention` leaves them, any strides but the last of
    piece.
    """
    if not on_triton(total):
        merge_reference(total, sums, piece, piece_sums)
        return
    tokens, heads, value_dim = total.shape
    rows = max(1, MERGED_VALUES // padded(value_dim))
    merge_pieces[triton.cdiv(tokens * heads, rows),](
        total=total,
        sums=sums,
        piece=piece,
        piece_sums=piece_sums,
        count=tokens * heads,
        heads=heads,
        piece_row=piece.stride(0),
        piece_head=piece.stride(1),
        sums_row=piece_sums.stride(0),
        sums_head=piece_sums.stride(1),
        rows=rows,
        value_dim=value_dim,
        value_pad=padded(value_dim),
        num_warps=4,
    )


def merge_reference(
    total: Tensor, sums: Tensor, piece: Tensor, piece_sums: Tensor
) -> None:
    """`merge_piece` in plain torch."""
    merged_sums = torch.logaddexp(sums, piece_sums)
    finite = merged_sums.clamp(min=-1e30)
    values = piece.float().where((piece_sums != -math.inf)[..., None], 0)
    total *= (sums - finite).exp()[..., None]
    total += values * (piece_sums - finite).exp()[..., None]
    sums.copy_(merged_sums)
