"""Attention with a state of fixed size: gated delta nets (Yang et al. 2025), Kimi delta
attention (Kimi Team 2025) and Mamba 2 (Dao and Gu 2024) by one rule.

A head's state S [K, V] takes a token's key k, value v and query q, and gives output o:

    S <- exp(decay) * S          a number a head, or one for each of the K channels
    u = beta * (v - S^T k)       delta rule; or step * v without correction (Mamba 2)
    S <- S + k u^T
    o = S^T q + skip * v

with decay = -rate * step, step = softplus(raw + bias), beta = sigmoid(raw).
"""

from math import inf

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from minfer.kernels.paged_states import PagedUnits, gather_states, scatter_states
from minfer.kernels.plain import SOFTPLUS_LINEAR_FROM
from minfer.kernels.state_work import StateWork


@frozen(eq=False)
class DecayGates:
    """What makes decay = -rates * step, with step = softplus(raw + bias), clamped."""

    raw: Tensor  # [tokens, heads], or of each key channel [tokens, heads, K]
    bias: Tensor  # [heads] or [heads, K] float32
    rates: Tensor  # [heads] float32: exp(A_log)
    # The smallest and the largest step
    low: float = 0.0
    high: float = inf

    def steps(self) -> Tensor:
        """Returns the steps in float32, in the shape of `raw`."""
        steps = F.softplus(self.raw.float() + self.bias, threshold=SOFTPLUS_LINEAR_FROM)
        return steps.clamp(self.low, self.high)

    def decays(self, steps: Tensor) -> Tensor:
        """Returns the decays, [tokens, heads, 1 or K]."""
        by_channel = steps if self.raw.dim() == 3 else steps[..., None]
        return -self.rates[:, None] * by_channel


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
    [K, V] of a head. Computes in float32. Values of tokens that belong to no row may be
    anything.
    """
    return _reference(
        q, k, v, decay, beta, units, work, skip=skip, l2_eps=l2_eps, scale=scale
    )


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: DecayGates,
    beta: Tensor | None,
    units: PagedUnits,
    work: StateWork,
    *,
    skip: Tensor | None,
    l2_eps: float | None,
    scale: float,
) -> Tensor:
    """`gated_rule` in plain torch."""
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
