"""The model as a function over tensors: one packed step, from token ids to logits.

The same on every device: a batch says which tokens run, its cache has their keys and
values and attends to them. Between two matrix products stands at most one kernel, or on
the CPU a few torch operations: at batch 1 and small sizes the time of a step is the
number of launches, not arithmetic.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.effects.models.batch import Batch
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import LayerWeights, Weights
from minfer.kernels import plain


class PagedCache(Protocol):
    """Keys and values of all layers in blocks."""

    def mix(self, batch: Batch, index: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """`attend`, for heads that are neither normalised nor rotated yet."""
        ...

    def attend(
        self, batch: Batch, index: int, qkv: Tensor, scale: float | None = None
    ) -> Tensor:
        """Keep the new keys and values, and let each token attend to its context, in its
        window.

        `qkv` [tokens, (heads + 2 * kv_heads) * head_dim], which may be written to;
        returns [tokens, heads * head_dim]. `scale` multiplies the scores; None is
        head_dim ** -0.5.
        """
        ...


Model = Callable[
    [Batch, Any], Tensor
]  # a step and its PagedCache: logits [sampled, vocab]


def forward(spec: ModelSpec, weights: Weights, batch: Batch, cache: PagedCache) -> Tensor:
    """Run one packed step and write its keys and values into `cache`.

    Returns logits [sampled, vocab] in the weights' dtype, in the order of `batch.sample`;
    no rows if nothing is sampled. Token ids must be inside the vocabulary, positions
    inside the cache's rotary table (on the CPU, IndexError otherwise).
    """
    ops: Any = plain
    if weights.embed.is_cuda:
        from minfer.kernels import linear as ops  # Triton, which the CPU does without

    eps = spec.rms_norm_eps
    with torch.inference_mode():
        hidden = F.embedding(batch.tokens, weights.embed)  # [tokens, hidden]
        for i, layer in enumerate(weights.layers):
            qkv = ops.norm_linear(
                hidden, layer.input_norm, eps, layer.qkv, layer.qkv_bias
            )
            mixed = cache.mix(batch, i, layer, qkv)
            if i + 1 == len(weights.layers) and batch.sample is not None:
                # Of the last layer, the others' keys and values were all that is needed.
                hidden = hidden.index_select(0, batch.sample)
                mixed = mixed.index_select(0, batch.sample)
            ops.linear_add(hidden, mixed, layer.out, layer.out_bias)
            wide = layer.gate_up, layer.gate_up_bias, batch.fused
            inner = ops.norm_gated(hidden, layer.post_norm, eps, *wide)
            ops.linear_add(hidden, inner, layer.down, layer.down_bias)
        logits: Tensor = ops.norm_linear(hidden, weights.norm, eps, weights.lm_head)
        return logits
