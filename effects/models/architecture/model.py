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

from minfer.effects.models.architecture.batch import Batch, Scored, Tap
from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.layers import attend, feed
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import norm_linear
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.ranks import ALONE, Ends, Ranks, whole_logits
from minfer.kernels.leaves import Norm
from minfer.kernels.plain import rms_norm

# A step and its PagedCache: logits [sampled, vocab], of several ranks a part of them.
Model = Callable[[Batch, Any], Tensor]


def forward(
    spec: ModelSpec,
    weights: Weights,
    batch: Batch,
    cache: PagedCache,
    ranks: Ranks = ALONE,
    ends: Ends | None = None,
) -> Tensor:
    """Run one packed step and write its keys and values into `cache`.

    Returns logits [sampled, vocab] in the activations' dtype, in the order of
    `batch.sample`; of several ranks, each returns the columns `spec.vocab_rows`. There
    are no rows if nothing is sampled. The states of `batch.tap` are put there, computed
    in plain torch on every device; `batch.scored` gets whole logits. Token ids must be
    inside the vocabulary, positions inside the cache's rotary table (on the CPU,
    IndexError otherwise). `ranks` run this at once, each with the weights that
    `spec.for_rank` describes; those of a stage before the last send the states of all
    tokens to the next, and return no rows. `ends` are the stage's; None: the ranks
    themselves.
    """
    ends = ranks if ends is None else ends
    last, picked = len(spec.layers) - 1, _picked(batch)
    with torch.inference_mode():
        hidden = _entered(spec, weights, batch.tokens, ranks, ends)  # [tokens, hidden]
        step = ModelStep(batch, cache, ranks, batch.real)
        for index, (layer, its) in enumerate(
            zip(spec.layers, weights.layers, strict=True)
        ):
            # The last layer continues with fewer tokens.
            keep = picked if index == last and spec.place.is_last_stage else None
            hidden = attend(its, hidden, index, step, keep)
            if keep is not None and step.real is not None:
                step = evolve(step, real=step.real.index_select(0, keep))
            feed(layer, its, hidden, step)
        if not spec.place.is_last_stage:
            ends.send(hidden)
            return hidden[:0]
        if batch.scored is not None:
            hidden = _scored(spec, batch.scored, hidden, weights, ranks)
        if batch.tap is not None:
            hidden = _tapped(batch.tap, hidden, weights.norm)
        return norm_linear(hidden, weights.norm, weights.lm_head)


def _entered(
    spec: ModelSpec, weights: Weights, tokens: Tensor, ranks: Ranks, ends: Ends
) -> Tensor:
    """Returns what the first of this rank's layers gets: the embeddings of tokens, or
    what the stage before sent.
    """
    if not spec.place.is_first_stage:
        return ends.receive(len(tokens))
    if spec.place.has_whole_matrices:
        return _scaled(spec, F.embedding(tokens, weights.embed))
    # Of tokens whose embeddings other ranks have, the part of the sum is zero.
    first, count = spec.vocab_rows.start, len(spec.vocab_rows)
    own = (tokens >= first) & (tokens < first + count)
    hidden = F.embedding((tokens - first).clamp(0, count - 1), weights.embed)
    return _scaled(spec, ranks.sum(hidden.mul_(own[:, None])))


def _scaled(spec: ModelSpec, hidden: Tensor) -> Tensor:
    """Returns embeddings scaled by a factor in their own dtype."""
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


def _scored(
    spec: ModelSpec, scored: Scored, hidden: Tensor, weights: Weights, ranks: Ranks
) -> Tensor:
    """Pass the logits of scored tokens, which come last, to `take`; returns the others'
    states.
    """
    others = len(hidden) - len(scored.tokens)
    own = hidden[others:]
    for span in scored.spans():
        part = norm_linear(own[span], weights.norm, weights.lm_head)
        scored.take(span.start, whole_logits(part, spec.vocab_size, ranks))
    return hidden[:others]


def _tapped(tap: Tap, hidden: Tensor, norm: Norm) -> Tensor:
    """Write the states of tapped tokens, which come last; returns the others'."""
    others = len(hidden) - len(tap.tokens)
    tap.states.copy_(rms_norm(hidden[others:], norm))
    return hidden[:others]
