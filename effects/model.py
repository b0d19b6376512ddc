"""The model as functions over tensors: one packed step, from token ids to logits.

Written for few launches: at batch 1 and small sizes the time of a step is the number of torch
operations, not arithmetic. Residuals are added by the matrix products themselves (`addmm_`).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.effects.attention import KVCache, attend
from minfer.effects.batch import Batch
from minfer.effects.spec import ModelSpec
from minfer.effects.weights import LayerWeights, Weights


def forward(spec: ModelSpec, weights: Weights, batch: Batch, cache: KVCache) -> Tensor:
    """Run one packed step and write its keys and values into `cache`.

    Returns logits [sampled, vocab] in the weights' dtype, in the order of `batch.sample`; no rows
    if nothing is sampled. Token ids must be inside the vocabulary, positions inside the cache's
    rotary table (IndexError otherwise).
    """
    with torch.inference_mode():
        hidden = weights.embed.index_select(0, batch.tokens)  # [tokens, hidden]
        cos, sin = cache.rope.index_select(0, batch.positions).unbind(1)  # [tokens, 1, head_dim]
        norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, hidden)
        if spec.family.qk_norm:
            head_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, hidden)
        for i, layer in enumerate(weights.layers):
            qkv = F.linear(norm(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(len(qkv), spec.heads + 2 * spec.kv_heads, spec.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                norm_heads(spec, qkv, layer.q_norm, layer.k_norm, head_norm)
            rotate(qkv[:, : spec.heads + spec.kv_heads], cos, sin)
            cache.slots[i].index_copy_(0, batch.slots, qkv[:, spec.heads :])
            hidden.addmm_(attend(spec, qkv, i, cache, batch), layer.out.t())
            if layer.out_bias is not None:
                hidden.add_(layer.out_bias)
            hidden.addmm_(gated(norm(hidden, layer.post_norm), layer), layer.down.t())
            if layer.down_bias is not None:
                hidden.add_(layer.down_bias)
        if batch.sample is not None:
            hidden = hidden.index_select(0, batch.sample)
        return F.linear(norm(hidden, weights.norm), weights.lm_head)


def gated(x: Tensor, layer: LayerWeights) -> Tensor:
    """SiLU(gate) * up (Shazeer 2020): [tokens, hidden] -> [tokens, intermediate]."""
    gate, up = F.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads in place: `x` [tokens, heads, head_dim], `cos` and `sin` [tokens, 1, head_dim].

    `sin` is negative for the first half of a head, so rotating halves is a roll. Computed in
    float32 whatever the dtype of `x`.
    """
    turned = x.roll(x.shape[-1] // 2, -1)
    if x.dtype is torch.float32:
        x.mul_(cos).addcmul_(turned, sin)
    else:
        x.copy_((x * cos).addcmul_(turned.float(), sin))


def norm_heads(
    spec: ModelSpec, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, norm: "RMSNorm"
) -> None:
    """Normalise each query and key head in place (Henry et al. 2020, with RMSNorm)."""
    query, key = qkv[:, : spec.heads], qkv[:, spec.heads : -spec.kv_heads]
    if norm.quick:
        both = qkv[:, : -spec.kv_heads]
        both.div_(norm.root_mean_square(both))
        query.mul_(q_weight)
        key.mul_(k_weight)
    else:
        query.copy_(norm(query, q_weight))
        key.copy_(norm(key, k_weight))


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich 2019), with what a step's calls share."""

    def __init__(self, size: int, eps: float, like: Tensor) -> None:
        self.shape, self.eps = (size,), eps
        # torch's own norm is six launches on the CPU; for float32 there, four are enough:
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(eps * n)) / sqrt(n).
        self.quick = like.dtype is torch.float32 and like.is_cpu
        if self.quick:
            self.floor = torch.tensor(math.sqrt(eps * size))
            self.scale = torch.tensor(1 / math.sqrt(size))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise [..., size] over its last dimension, in float32 inside."""
        if not self.quick:
            return F.rms_norm(x, self.shape, weight, self.eps)
        return x.div(self.root_mean_square(x)).mul_(weight)

    def root_mean_square(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., 1], for `quick` ones."""
        size: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        return size.hypot_(self.floor).mul_(self.scale)
