"""What a draft head computes: functions over its weights.

A step of a target gives the states of its tokens, of which `project_states` makes one
state h for each. The head's layer is one more layer of the cache, `index`: the slot of a
token t holds keys and values of [e(t), h], where h is of the token before t. `store_head`
writes these alone, which is all that is needed of tokens behind which nothing is drafted;
`run_head` computes the layer, too. Of its result `head_logits` makes logits, and it is
the h of the next draft.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import frozen

from minfer.effects.models.architecture.draft_head import MTP, HeadSpec
from minfer.effects.models.architecture.layer_step import feed, mix_tokens, store_keys
from minfer.effects.models.architecture.model import embed_tokens
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.products import linear, norm_linear, normalise
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import Weights
from minfer.effects.models.draft_heads.head_weights import DraftHeadWeights
from minfer.effects.models.ranks import whole_logits
from minfer.kernels.scaled_logits import scale_logits

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class HeadInput:
    """The input of a head's layer, made of [e(t), h]."""

    hidden: "Tensor"  # [tokens, hidden]: the residual stream, which the layer adds to
    # [tokens, 2 * hidden]: what queries, keys and values are products of; None: of the
    # normalised stream
    rows: "Tensor | None"


def project_states(
    head: HeadSpec,
    weights: DraftHeadWeights,
    target: Weights,
    states: "Tensor",
    step: ModelStep,
) -> "Tensor":
    """Returns h [tokens, hidden] of the residual streams [tokens, streams *
    target_hidden] of the target's `head.hidden_layers`, side by side.
    """
    if head.after_norm:
        states = normalise(states, target.norm)
    if head.kind == MTP or weights.projection is None:
        return states
    if weights.state_norms:
        parts = states.chunk(len(weights.state_norms), 1)
        pairs = zip(parts, weights.state_norms, strict=True)
        normed = [normalise(part, norm) for part, norm in pairs]
        states = torch.cat(normed, 1)
    return linear(states, weights.projection, step.products)


def embed_for_head(
    spec: ModelSpec,
    weights: DraftHeadWeights,
    target: Weights,
    tokens: "Tensor",
    step: ModelStep,
) -> "Tensor":
    """Returns the embeddings [tokens, hidden] of tokens of the target's vocabulary."""
    if weights.embed is not None:
        return F.embedding(tokens, weights.embed)
    return embed_tokens(spec, target, tokens, step.communicator)


def store_head(
    head: HeadSpec,
    weights: DraftHeadWeights,
    embeddings: "Tensor",
    states: "Tensor",
    index: int,
    step: ModelStep,
) -> None:
    """Write what the head's attention keeps of tokens: of their `embeddings` [tokens,
    hidden] and of `states` [tokens, hidden], the h of the token before each.
    """
    layer_input = _layer_input(head, weights, embeddings, states, step)
    hidden, rows = layer_input.hidden, layer_input.rows
    store_keys(head.layer, weights.layer, hidden, index, step, rows)


def run_head(
    head: HeadSpec,
    weights: DraftHeadWeights,
    embeddings: "Tensor",
    states: "Tensor",
    index: int,
    step: ModelStep,
) -> "Tensor":
    """Returns the states [tokens, hidden] behind the head's layer, of which
    `head_logits` makes logits, and which are the h of the tokens that these draft; writes
    what its attention keeps, as `store_head` does.
    """
    layer_input = _layer_input(head, weights, embeddings, states, step)
    layer, layer_weights, rows = head.layer, weights.layer, layer_input.rows
    hidden = layer_input.hidden
    if hidden is states:
        hidden = states.clone()  # the layer adds to it
    hidden = mix_tokens(layer, layer_weights, hidden, index, step, None, rows)
    feed(layer, layer_weights, hidden, step)
    if head.chains_normed and weights.norm is not None:
        hidden = normalise(hidden, weights.norm)
    return hidden


def head_logits(
    spec: ModelSpec,
    head: HeadSpec,
    weights: DraftHeadWeights,
    target: Weights,
    hidden: "Tensor",
    step: ModelStep,
) -> "Tensor":
    """Returns logits [tokens, vocab] of the target's vocabulary for the results of
    `run_head`, on every rank all of them; -inf for tokens that the head does not know.
    """
    norm = None if head.chains_normed else weights.norm
    if weights.lm_head is None:
        logits = norm_linear(hidden, norm, target.lm_head, step.products)
        return whole_logits(logits, spec.vocab_size, step.communicator)
    logits = norm_linear(hidden, norm, weights.lm_head, step.products)
    if head.logit_scale != 1:
        scale_logits(logits, head.logit_scale, None)
    if weights.target_ids is None:
        return logits
    whole = logits.new_full((len(logits), spec.vocab_size), float("-inf"))
    return whole.index_copy_(1, weights.target_ids, logits)


def _layer_input(
    head: HeadSpec,
    weights: DraftHeadWeights,
    embeddings: "Tensor",
    states: "Tensor",
    step: ModelStep,
) -> HeadInput:
    """Returns what the layer gets of [e(t), h], both normalised."""
    normed_states = normalise(states, weights.hidden_norm)
    rows = torch.cat((normalise(embeddings, weights.embedding_norm), normed_states), 1)
    if head.kind == MTP and weights.projection is not None:
        return HeadInput(linear(rows, weights.projection, step.products), None)
    return HeadInput(normed_states if head.normed_residual else states, rows)
