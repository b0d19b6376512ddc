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

Chunks go block by block (Yang et al. 2024): with g_i, the sum of decays up to token i of
a block, a block's u solve a triangular system,

    (I + A) u = beta * (v - exp(g) * S^T k),   A_ij = beta_i k_i.k_j exp(g_i - g_j), j < i

and then o_i = exp(g_i) S^T q_i + sum_{j <= i} q_i.k_j exp(g_i - g_j) u_j, and the state
after the block is exp(g_last) S + sum_j exp(g_last - g_j) k_j u_j^T. `prepare` computes
(I + A)^-1 and the products of queries and keys for all blocks at once; `carry` takes a
row's blocks one after another, five products of matrices each. No exponent is positive.
Under decays of each channel A is not a product of matrices, so blocks are small.
"""

import torch
from torch import Tensor

from minfer.kernels import on_triton
from minfer.kernels.paged_states import (
    PagedUnits,
    copy_states,
    gather_states,
    scatter_states,
)
from minfer.kernels.rule_arguments import DecayGates, RuleArguments
from minfer.kernels.state_work import StateWork


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
    of the rows, but for those with drafts.

    `q` and `k` [tokens, key heads, K]: head h reads key head h // (heads / key heads).
    `v` [tokens, heads, V]. Heads of a token are contiguous; the strides of tokens may be
    larger. `beta` [tokens, heads], before the sigmoid; None: u = step * v, with a decay
    of one number a head. `skip` [heads] float32. `l2_eps`: q and k are first divided by
    sqrt(sum of squares + l2_eps). `scale`: a factor of q. A unit of the state is the S
    [K, V] of a head. Computes in float32, but for products of long chunks in 2 bytes,
    whose factors are rounded. Values of tokens that belong to no row may be anything.
    """
    rule = RuleArguments(q, k, v, decay, beta, units, work, skip, l2_eps, scale)
    if not on_triton(v):
        return _reference(rule)
    from minfer.kernels.gated_rule_launches import launch  # not everywhere is Triton

    out = v.new_empty(v.shape)
    launch(rule, out)
    return out


def _reference(rule: RuleArguments) -> Tensor:
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
        state.masked_fill_(spans.is_new[:, None, None, None], 0)
        for token in spans.tokens.unbind(1):
            state *= factors[token]
            new = value[token]
            if beta is not None:
                new = new - torch.einsum("nhkv,nhk->nhv", state, key[token])
            new = new * strengths[token]
            state.addcmul_(key[token][..., None], new[:, :, None])
            out[token] = torch.einsum("nhkv,nhk->nhv", state, query[token])
        if spans.writes:
            scatter_states(units, work.table, spans.rows, state)
            copy_states(units, work.table, spans.rows, spans.saved)
    if skip is not None:
        out += value * skip[:, None]
    return out.to(v.dtype)


def _unit_length(x: Tensor, eps: float | None) -> Tensor:
    """Divides vectors by their length, unless eps is None."""
    if eps is None:
        return x
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
