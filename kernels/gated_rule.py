"""Attention with a state of fixed size: gated delta nets (Yang et al. 2025), Kimi delta
attention (Kimi Team 2025) and Mamba 2 (Dao and Gu 2024) by one rule.

A head's state S [K, V] takes a token's key k, value v and query q, and gives output o:

    S <- exp(decay) * S          a number a head, or one for each of the K channels
    u = beta * (v - S^T k)       delta rule; or step * v without correction (Mamba 2)
    S <- S + k u^T
    o = S^T q + skip * v

with decay = -rate * step, step = softplus(raw + bias), beta = sigmoid(raw).

Decode rows are bound by memory: a state of 32 heads of 128 x 128 in float32 is 2.1 MB, so
that 256 rows read and write 1.07 GB a layer, 256 us at 4.2 TB/s. A program has some
columns of a head's state, which do not depend on the others, in registers.

Chunks go block by block (Yang et al. 2024): with growth g_i, the sum of decays up to token
i of a block, a block's u solve a triangular system,

    (I + A) u = beta * (v - exp(g) * S^T k),    A_ij = beta_i k_i.k_j exp(g_i - g_j), j < i

and then o_i = exp(g_i) S^T q_i + sum_{j <= i} q_i.k_j exp(g_i - g_j) u_j, and the state
after the block is exp(g_last) S + sum_j exp(g_last - g_j) k_j u_j^T. `prepare` computes
(I + A)^-1 and the products of queries and keys for all blocks at once; `carry` takes a
row's blocks one after another, five products of matrices each. No exponent is positive.
Under decays of each channel A is not a product of matrices, so blocks are small.
"""

from math import inf
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
import triton
from attrs import frozen
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.chunked_rule_kernels import FACTORS, carry, prepare, prepare_channels
from minfer.kernels.gated_rule_kernels import recur
from minfer.kernels.paged_states import PagedUnits, gather_states, scatter_states
from minfer.kernels.pdl import early
from minfer.kernels.plain import SOFTPLUS_LINEAR_FROM
from minfer.kernels.state_kernels import most_blocks
from minfer.kernels.state_work import StateChunks, StateWork

DECODE_VALUES: Final = 32  # columns of a state that a program has
DECODE_WARPS: Final = 4
# Chunks that may be longer go block by block; the others token by token.
MAX_RECURRENT_TOKENS: Final = 16
BLOCK: Final = 64  # tokens
CHANNEL_BLOCK: Final = 16  # tokens, under decays of each channel
# Their products are of tensor cores; those of float32 would not be.
BLOCK_TYPES: Final = (torch.bfloat16, torch.float16)
MIN_PRODUCT_SIDE: Final = 16  # of tl.dot
CARRY_VALUES: Final = 32  # columns of a state that a program has
CARRY_WARPS: Final = 4
PREPARE_WARPS: Final = 4


@frozen(eq=False)
class DecayGates:
    """What makes decay = -rates * step, with step = softplus(raw + bias), clamped."""

    raw: Tensor  # [tokens, heads], or of each key channel [tokens, heads, K]
    bias: Tensor  # [heads] or [heads, K] float32
    rates: Tensor  # [heads] float32: exp(A_log)
    # The smallest and the largest step
    low: float = 0.0
    high: float = inf

    @property
    def by_channel(self) -> bool:
        """Whether each key channel has a decay of its own."""
        return self.raw.dim() == 3

    def steps(self) -> Tensor:
        """Returns the steps in float32, in the shape of `raw`."""
        steps = F.softplus(self.raw.float() + self.bias, threshold=SOFTPLUS_LINEAR_FROM)
        return steps.clamp(self.low, self.high)

    def decays(self, steps: Tensor) -> Tensor:
        """Returns the decays, [tokens, heads, 1 or K]."""
        by_channel = steps if self.by_channel else steps[..., None]
        return -self.rates[:, None] * by_channel


class _Rule(NamedTuple):
    """The arguments of `gated_rule`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: DecayGates
    beta: Tensor | None
    units: PagedUnits
    work: StateWork
    skip: Tensor | None
    l2_eps: float | None
    scale: float


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: DecayGates,
    beta: Tensor | None,
    units: PagedUnits,
    work: StateWork,
    *,
    skip: Tensor | None = None,
    l2_eps: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Returns o [tokens, heads, V] of each token, in the dtype of `v`; updates the states
    of the rows.

    `q` and `k` [tokens, key heads, K]: head h reads key head h // (heads / key heads).
    `v` [tokens, heads, V]. Heads of a token are contiguous; the strides of tokens may be
    larger. `beta` [tokens, heads], before the sigmoid; None: u = step * v, with a decay
    of one number a head. `skip` [heads] float32. `l2_eps`: q and k are first divided by
    sqrt(sum of squares + l2_eps). `scale`: a factor of q. A unit of the state is the S
    [K, V] of a head. Computes in float32, but for products of long chunks in 2 bytes,
    whose factors are rounded. Values of tokens that belong to no row may be anything.
    """
    rule = _Rule(q, k, v, decay, beta, units, work, skip, l2_eps, scale)
    if not on_triton(v):
        return _reference(rule)
    out = v.new_empty(v.shape)
    if len(work.rows):
        _launch_tokens(rule, out, None)
    if work.chunks is not None:
        is_long = work.chunks.longest > MAX_RECURRENT_TOKENS
        if is_long and v.dtype in BLOCK_TYPES:
            _launch_blocks(rule, out, work.chunks)
        else:
            _launch_tokens(rule, out, work.chunks)
    return out


def _launch_tokens(rule: _Rule, out: Tensor, chunks: StateChunks | None) -> None:
    """Launch the rule of decode rows, or of chunks token by token."""
    heads, values = rule.v.shape[1:]
    keys = rule.k.shape[2]
    tile = min(DECODE_VALUES, triton.next_power_of_2(values))
    rows = rule.work if chunks is None else chunks
    recur[triton.cdiv(values, tile), heads, len(rows.rows)](
        **_gates(rule),
        **_states(rule),
        out=out,
        rows=rows.rows,
        starts=rows.starts,
        counts=None if chunks is None else chunks.counts,
        offsets=None if chunks is None else chunks.offsets,
        q=rule.q,
        k=rule.k,
        q_stride=rule.q.stride(0),
        k_stride=rule.k.stride(0),
        shared=heads // rule.k.shape[1],
        keys=keys,
        key_pad=triton.next_power_of_2(keys),
        tile=tile,
        by_channel=rule.decay.by_channel,
        num_warps=DECODE_WARPS,
        launch_pdl=early(rule.v),
    )


def _launch_blocks(rule: _Rule, out: Tensor, chunks: StateChunks) -> None:
    """Launch the rule of chunks block by block."""
    tokens, heads, values = rule.v.shape
    keys, count = rule.k.shape[2], len(chunks.rows)
    by_channel = rule.decay.by_channel
    block = CHANNEL_BLOCK if by_channel else BLOCK
    blocks = most_blocks(tokens, count, block)
    shape: dict[str, Any] = {
        "keys": keys,
        "key_pad": max(MIN_PRODUCT_SIDE, triton.next_power_of_2(keys)),
        "block": block,
        "pad": triton.next_power_of_2(count),
        "launch_pdl": early(rule.v),
    }
    prepared = _prepare(rule, chunks, blocks, shape)
    tile = max(MIN_PRODUCT_SIDE, min(CARRY_VALUES, triton.next_power_of_2(values)))
    carry[triton.cdiv(values, tile), heads, count](
        **prepared,
        **_states(rule),
        **shape,
        out=out,
        rows=chunks.rows,
        starts=chunks.starts,
        counts=chunks.counts,
        offsets=chunks.offsets,
        q_stride=prepared["q"].stride(0),
        k_stride=prepared["k"].stride(0),
        shared=heads // prepared["k"].shape[1],
        tile=tile,
        num_warps=CARRY_WARPS,
    )


def _prepare(
    rule: _Rule, chunks: StateChunks, blocks: int, shape: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Returns what `carry` needs of the blocks, by its names."""
    tokens, heads, _ = rule.v.shape
    q, k = rule.q, rule.k
    squares = blocks, heads, shape["block"], shape["block"]
    prepared: dict[str, Tensor | None] = {
        "inverses": None if rule.beta is None else k.new_empty(squares),
        "scores": k.new_empty(squares),
    }
    arguments: dict[str, Any] = {
        **_gates(rule),
        **shape,
        **prepared,
        "q": q,
        "k": k,
        "counts": chunks.counts,
        "offsets": chunks.offsets,
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "chunks": len(chunks.rows),
        "shared": heads // k.shape[1],
        "num_warps": PREPARE_WARPS,
    }
    if rule.decay.by_channel:
        names = ("q", "k", "written_keys")
        scaled = k.new_empty(3, tokens, heads, shape["keys"]).unbind()
        totals = k.new_empty(blocks, heads, shape["keys"], dtype=torch.float32)
        prepare_channels[blocks, heads](
            **arguments,
            queries=scaled[0],
            read_keys=scaled[1],
            written_keys=scaled[2],
            totals=totals,
        )
        by_name = dict(zip(names, scaled, strict=True))
        return {**prepared, **by_name, "totals": totals, "factors": None}
    factors = k.new_empty(blocks, heads, FACTORS, shape["block"], dtype=torch.float32)
    prepare[blocks, heads](**arguments, factors=factors)
    plain = {"q": q, "k": k, "written_keys": None, "totals": None}
    return {**prepared, **plain, "factors": factors}


def _gates(rule: _Rule) -> dict[str, Any]:
    """Returns the arguments of kernels that make decays and strengths of gates, and
    normalise.
    """
    decay, beta = rule.decay, rule.beta
    return {
        "raw": decay.raw,
        "bias": decay.bias,
        "rates": decay.rates,
        "beta": beta,
        "raw_stride": decay.raw.stride(0),
        "beta_stride": 0 if beta is None else beta.stride(0),
        "low": decay.low,
        "high": decay.high,
        "l2_eps": rule.l2_eps,
        "scale": rule.scale,
    }


def _states(rule: _Rule) -> dict[str, Any]:
    """Returns the arguments of kernels that read values and update states."""
    units, table = rule.units, rule.work.table
    return {
        "v": rule.v,
        "skip": rule.skip,
        "table": table,
        "pages": units.pages,
        "v_stride": rule.v.stride(0),
        "table_stride": table.stride(0),
        "page_stride": units.pages.stride(0),
        "first_page": units.first_page,
        "first_unit": units.first_unit,
        "per_page": units.pages.shape[1],
        "values": rule.v.shape[2],
    }


def _reference(rule: _Rule) -> Tensor:
    """`gated_rule` in plain torch."""
    q, k, v, decay, beta, units, work, skip, l2_eps, scale = rule
    shared = v.shape[1] // k.shape[1]  # heads of a key head
    query, key = (
        _unit_length(x.float(), l2_eps).repeat_interleave(shared, 1) for x in (q, k)
    )
    query, value, steps = query * scale, v.float(), decay.steps()
    factors = decay.decays(steps).exp()[..., None]
    strengths = (steps if beta is None else beta.float().sigmoid())[..., None]
    out = torch.zeros_like(value)
    for spans in work.spans():
        state = gather_states(units, work.table, spans.rows).float()
        state = state.masked_fill(spans.is_new[:, None, None, None], 0)
        for token in spans.tokens.unbind(1):
            state *= factors[token]
            new = value[token]
            if beta is not None:
                new = new - torch.einsum("nhkv,nhk->nhv", state, key[token])
            new = new * strengths[token]
            state += key[token][..., None] * new[:, :, None]
            out[token] = torch.einsum("nhkv,nhk->nhv", state, query[token])
        scatter_states(units, work.table, spans.rows, state)
    if skip is not None:
        out += value * skip[:, None]
    return out.to(v.dtype)


def _unit_length(x: Tensor, eps: float | None) -> Tensor:
    """Divides vectors by their length, unless eps is None."""
    if eps is None:
        return x
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
