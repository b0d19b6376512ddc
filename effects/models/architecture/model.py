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

from minfer.effects.models.architecture.altup import enter_streams, leave_streams
from minfer.effects.models.architecture.batch import (
    BEHIND_LAST,
    Batch,
    ChunkedLogits,
    TappedTokens,
)
from minfer.effects.models.architecture.cache import PagedCache
from minfer.effects.models.architecture.layer_inputs import make_layer_inputs
from minfer.effects.models.architecture.layer_step import run_layer
from minfer.effects.models.architecture.model_step import KeptTokens, ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import norm_linear
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.ranks import SINGLE_RANK, Communicator, StageIO, whole_logits
from minfer.kernels.leaves import Norm
from minfer.kernels.plain import normalise
from minfer.kernels.plain_lora import AdapterTokens
from minfer.kernels.scaled_logits import scale_logits

# A step and its PagedCache: logits [sampled, vocab], of several ranks a part of them.
Model = Callable[[Batch, Any], Tensor]


def forward(
    spec: ModelSpec,
    weights: Weights,
    batch: Batch,
    cache: PagedCache,
    communicator: Communicator = SINGLE_RANK,
    stage_io: StageIO | None = None,
) -> Tensor:
    """Run one packed step and write its keys and values into `cache`.

    Returns logits [sampled, vocab] in the activations' dtype, in the order of
    `batch.sample`; of several ranks, each returns the columns `spec.vocab_rows`. There
    are no rows if nothing is sampled. The states of `batch.tap` are put there, computed
    in plain torch on every device; `batch.scored` gets whole logits. Token ids must be
    inside the vocabulary, positions inside the cache's rotary table (on the CPU,
    IndexError otherwise). All ranks run this at once, each with the weights that
    `spec.for_rank` describes; those of a stage before the last send the states of all
    tokens to the next, and return no rows. `stage_io` receives and sends these states;
    None: `communicator` does.
    """
    stage_io = communicator if stage_io is None else stage_io
    slots = batch.adapter_slots
    products = ProductContext(
        batch.tokens.is_cuda,
        batch.fused,
        batch.real,
        None if slots is None else AdapterTokens(slots),
    )
    last, picked = len(spec.layers) - 1, _picked_tokens(batch)
    with torch.inference_mode():
        # [tokens, hidden]
        hidden = _enter_stage(spec, weights, batch.tokens, communicator, stage_io)
        layer_inputs = _layer_inputs(spec, weights, batch.tokens, hidden, products)
        step = ModelStep(batch, cache, communicator, products, layer_inputs)
        if weights.projections is not None:
            hidden = enter_streams(weights.projections, hidden, products)
        kept, states = None, batch.layer_states
        if picked is not None and spec.rank_info.is_last_stage:
            kept = KeptTokens(picked, step.select(picked))
        # The last layer continues with fewer tokens, unless a draft head reads all.
        narrows = states is None or BEHIND_LAST not in states.layers
        layers = zip(spec.layers, weights.layers, strict=True)
        for index, (layer, layer_weights) in enumerate(layers):
            if states is not None:
                states.note(index, hidden)
            kept_here = kept if index == last and narrows else None
            hidden = run_layer(layer, layer_weights, hidden, index, step, kept_here)
        if states is not None and not narrows:
            states.note(BEHIND_LAST, hidden)
            hidden = hidden if kept is None else hidden.index_select(0, kept.tokens)
        if weights.projections is not None:
            hidden = leave_streams(weights.projections, hidden)
        step = step if kept is None else kept.step
        if not spec.rank_info.is_last_stage:
            stage_io.send(hidden)
            return hidden[:0]
        if batch.scored is not None:
            hidden = _score_tokens(spec, batch.scored, hidden, weights, step)
        if batch.tap is not None:
            hidden = _copy_tapped_states(batch.tap, hidden, weights.norm)
        return _logits(spec, weights, hidden, step)


def _layer_inputs(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    hidden: Tensor,
    products: ProductContext,
) -> Tensor | None:
    """Returns the inputs that layers have beside the residual stream, if they do."""
    if spec.input_table is None or weights.input_table is None:
        return None
    return make_layer_inputs(
        spec.input_table, weights.input_table, tokens, hidden, products
    )


def _enter_stage(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    communicator: Communicator,
    stage_io: StageIO,
) -> Tensor:
    """Returns what the first of this rank's layers gets: the embeddings of tokens, or
    what the stage before sent.
    """
    if not spec.rank_info.is_first_stage:
        return stage_io.receive(len(tokens))
    return embed_tokens(spec, weights, tokens, communicator)


def embed_tokens(
    spec: ModelSpec, weights: Weights, tokens: Tensor, communicator: Communicator
) -> Tensor:
    """Returns the scaled embeddings [tokens, hidden] of tokens: of a rank that has some
    rows of the embedding, the sum over the ranks.
    """
    if spec.rank_info.has_whole_matrices:
        return _scaled(spec, F.embedding(tokens, weights.embed))
    # Of tokens whose embeddings other ranks have, the part of the sum is zero.
    first, count = spec.vocab_rows.start, len(spec.vocab_rows)
    is_own_token = (tokens >= first) & (tokens < first + count)
    hidden = F.embedding((tokens - first).clamp(0, count - 1), weights.embed)
    return _scaled(spec, communicator.sum(hidden.mul_(is_own_token[:, None])))


def _scaled(spec: ModelSpec, hidden: Tensor) -> Tensor:
    """Returns scaled embeddings; Gemma rounds the factor to their dtype."""
    if spec.embedding_scale != 1:
        factor = spec.embedding_scale
        if spec.family.factors.embedding_root:
            factor = torch.tensor(factor, dtype=hidden.dtype).item()
        hidden.mul_(factor)
    return hidden


def _picked_tokens(batch: Batch) -> Tensor | None:
    """Returns the tokens that the last layer continues with: sampled ones, then tapped
    ones, then scored ones; None: every token.
    """
    sample = batch.sample
    further = [
        request.tokens for request in (batch.tap, batch.scored) if request is not None
    ]
    if not further:
        return sample
    if sample is None:
        sample = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return torch.cat((sample.to(further[0].dtype), *further))


def _score_tokens(
    spec: ModelSpec,
    scored: ChunkedLogits,
    hidden: Tensor,
    weights: Weights,
    step: ModelStep,
) -> Tensor:
    """Pass the logits of scored tokens, which come last, to `take`; returns the others'
    states.
    """
    num_others = len(hidden) - len(scored.tokens)
    scored_hidden = hidden[num_others:]
    for span in scored.spans():
        logits = _logits(spec, weights, scored_hidden[span], step)
        scored.take(span.start, whole_logits(logits, spec.vocab_size, step.communicator))
    return hidden[:num_others]


def _logits(spec: ModelSpec, weights: Weights, hidden: Tensor, step: ModelStep) -> Tensor:
    """Returns the logits of states, scaled and capped: [tokens, hidden] -> [tokens,
    vocab].
    """
    logits = norm_linear(hidden, weights.norm, weights.lm_head, step.products)
    if spec.logit_scale != 1 or spec.logit_cap is not None:
        scale_logits(logits, spec.logit_scale, spec.logit_cap)
    return logits


def _copy_tapped_states(tap: TappedTokens, hidden: Tensor, norm: Norm) -> Tensor:
    """Write the states of tapped tokens, which come last; returns the others'."""
    num_others = len(hidden) - len(tap.tokens)
    tap.states.copy_(normalise(hidden[num_others:], norm))
    return hidden[:num_others]
