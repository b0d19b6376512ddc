"""The model as a function over tensors: one packed step, from token ids to logits.

The same on every device: the batch has the tokens, its cache has their keys and values
and computes attention. Between two matrix products is at most one kernel, or on the CPU a
few torch operations: at batch 1 and small sizes the time of a step depends on the number
of launches, not on arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.effects.models.batch import Batch, Scored, Tap
from minfer.effects.models.cache import PagedCache
from minfer.effects.models.layers import feed, mix
from minfer.effects.models.products import ALONE, Ranks, add_product, norm_linear
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.kernels.plain import rms_norm

# A step and its PagedCache: logits [sampled, vocab].
Model = Callable[[Batch, Any], Tensor]


def forward(
    spec: ModelSpec,
    weights: Weights,
    batch: Batch,
    cache: PagedCache,
    ranks: Ranks = ALONE,
) -> Tensor:
    """Run one packed step and write its keys and values into `cache`.

    Returns logits [sampled, vocab] in the activations' dtype, in the order of
    `batch.sample`; no rows if nothing is sampled. The states of `batch.tap` are put
    there, computed in plain torch on every device; `batch.scored` gets its logits. Token
    ids must be inside the vocabulary, positions inside the cache's rotary table (on the
    CPU, IndexError otherwise). `ranks` run this at once, each with its part of the split
    matrices.
    """
    eps, last = spec.rms_norm_eps, len(weights.layers) - 1
    picked = _picked(batch)
    with torch.inference_mode():
        hidden = F.embedding(batch.tokens, weights.embed)  # [tokens, hidden]
        for index, layer in enumerate(weights.layers):
            mixed = mix(layer.attention, hidden, eps, index, batch, cache)
            if index == last and picked is not None:
                # In the last layer, only keys and values of the other tokens are needed.
                hidden = hidden.index_select(0, picked)
                mixed = mixed.index_select(0, picked)
            add_product(hidden, mixed, layer.attention.out, ranks)
            feed(layer.feed_forward, hidden, eps, ranks, fused=batch.fused)
        if batch.scored is not None:
            hidden = _scored(batch.scored, hidden, weights, eps)
        if batch.tap is not None:
            hidden = _tapped(batch.tap, hidden, weights.norm, eps)
        return norm_linear(hidden, weights.norm, eps, weights.lm_head)


def _picked(batch: Batch) -> Tensor | None:
    """Returns the tokens that the last layer continues with: sampled ones, then tapped
    ones, then scored ones; None: every token.
    """
    sample = batch.sample
    more = [one.tokens for one in (batch.tap, batch.scored) if one is not None]
    if not more:
        return sample
    if sample is None:
        sample = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return torch.cat((sample.to(more[0].dtype), *more))


def _scored(scored: Scored, hidden: Tensor, weights: Weights, eps: float) -> Tensor:
    """Pass the logits of scored tokens, which come last, to `take`; returns the others'
    states.
    """
    others = len(hidden) - len(scored.tokens)
    own = hidden[others:]
    for span in scored.spans():
        logits = norm_linear(own[span], weights.norm, eps, weights.lm_head)
        scored.take(span.start, logits)
    return hidden[:others]


def _tapped(tap: Tap, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Write the states of tapped tokens, which come last; returns the others'."""
    others = len(hidden) - len(tap.tokens)
    tap.states.copy_(rms_norm(hidden[others:], norm, eps))
    return hidden[:others]
