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
from attrs import evolve
from torch import Tensor

from minfer.effects.models.batch import Batch, Scored, Tap
from minfer.effects.models.cache import PagedCache
from minfer.effects.models.layers import attend, feed
from minfer.effects.models.model_step import ModelStep
from minfer.effects.models.products import ALONE, Ranks, norm_linear
from minfer.effects.models.spec import ModelSpec
from minfer.effects.models.weights import Weights
from minfer.kernels.leaves import Norm
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
    last, picked = len(spec.layers) - 1, _picked(batch)
    with torch.inference_mode():
        hidden = _embedded(spec, weights, batch.tokens)  # [tokens, hidden]
        step = ModelStep(batch, cache, ranks, batch.real)
        for index, (layer, its) in enumerate(
            zip(spec.layers, weights.layers, strict=True)
        ):
            # The last layer continues with fewer tokens.
            keep = picked if index == last else None
            hidden = attend(its, hidden, index, step, keep)
            if keep is not None and step.real is not None:
                step = evolve(step, real=step.real.index_select(0, keep))
            feed(layer, its, hidden, step)
        if batch.scored is not None:
            hidden = _scored(batch.scored, hidden, weights)
        if batch.tap is not None:
            hidden = _tapped(batch.tap, hidden, weights.norm)
        return norm_linear(hidden, weights.norm, weights.lm_head)


def _embedded(spec: ModelSpec, weights: Weights, tokens: Tensor) -> Tensor:
    """Returns the embeddings of tokens, scaled by a factor in their own dtype."""
    hidden = F.embedding(tokens, weights.embed)
    if spec.embedding_scale != 1:
        factor = torch.tensor(spec.embedding_scale, dtype=hidden.dtype)
        hidden.mul_(factor.item())
    return hidden


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


def _scored(scored: Scored, hidden: Tensor, weights: Weights) -> Tensor:
    """Pass the logits of scored tokens, which come last, to `take`; returns the others'
    states.
    """
    others = len(hidden) - len(scored.tokens)
    own = hidden[others:]
    for span in scored.spans():
        logits = norm_linear(own[span], weights.norm, weights.lm_head)
        scored.take(span.start, logits)
    return hidden[:others]


def _tapped(tap: Tap, hidden: Tensor, norm: Norm) -> Tensor:
    """Write the states of tapped tokens, which come last; returns the others'."""
    others = len(hidden) - len(tap.tokens)
    tap.states.copy_(rms_norm(hidden[others:], norm))
    return hidden[:others]
