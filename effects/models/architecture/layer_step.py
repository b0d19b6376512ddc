"""The step of a decoder layer: functions over its weights, by the types of layers.py."""

from typing import TYPE_CHECKING, Final

from attrs import frozen

from minfer.effects.models.architecture.altup import (
    AltUpWeights,
    correct_streams,
    predict_streams,
    scaled_active,
)
from minfer.effects.models.architecture.dense import Dense, DenseWeights, feed_dense
from minfer.effects.models.architecture.gaussian_topk import feed_sparse
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.gqa_step import attend_gqa, store_gqa
from minfer.effects.models.architecture.gqa_weights import GQAWeights
from minfer.effects.models.architecture.laurel import add_laurel, laurel_rows
from minfer.effects.models.architecture.layer_inputs import layer_input_rows
from minfer.effects.models.architecture.layers import Layer, LayerWeights
from minfer.effects.models.architecture.mla import MLAWeights, attend_mla, store_mla
from minfer.effects.models.architecture.model_step import KeptTokens, ModelStep
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_step import feed_moe
from minfer.effects.models.architecture.moe_weights import MoEWeights
from minfer.effects.models.architecture.products import add_product, normalise
from minfer.effects.models.architecture.recurrent import mix_with_state

if TYPE_CHECKING:
    from torch import Tensor


def run_layer(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    kept: KeptTokens | None = None,
) -> "Tensor":
    """Returns the residual stream [tokens, hidden] behind layer `index`, or with AltUp
    all streams [tokens, streams, hidden]: of the kept tokens, or of all.
    """
    if weights.altup is not None:
        return _run_on_streams(layer, weights, weights.altup, hidden, index, step, kept)
    branches = branch_inputs(layer, weights, hidden)
    hidden = mix_tokens(layer, weights, hidden, index, step, kept, branches.attention)
    if kept is not None:
        step, branches = kept.step, branches.select(kept.tokens)
    feed(layer, weights, hidden, step, branches.feed_forward)
    finish(weights, hidden, index, step)
    return hidden


def _run_on_streams(
    layer: Layer,
    weights: LayerWeights,
    altup: AltUpWeights,
    streams: "Tensor",
    index: int,
    step: ModelStep,
    kept: KeptTokens | None,
) -> "Tensor":
    """Returns the streams [tokens, streams, hidden] behind a layer that computes one of
    them.
    """
    predictions = predict_streams(altup, streams, step.products)
    hidden = predictions[:, altup.active].clone()  # the layer adds to it
    norm = None if weights.attention is None else weights.attention.norm
    x = hidden if norm is None else normalise(hidden, norm)
    laurel = laurel_rows(altup.laurel, x, step.products)
    hidden = mix_tokens(layer, weights, hidden, index, step, kept, x)
    if kept is not None:
        step = kept.step
        laurel = laurel.index_select(0, kept.tokens)
        predictions = predictions.index_select(0, kept.tokens)
    add_laurel(hidden, laurel)
    feed(layer, weights, hidden, step)
    correct_streams(altup, predictions, hidden, step.products)
    if weights.inputs is not None and step.layer_inputs is not None:
        active, inputs = scaled_active(altup, predictions), step.layer_inputs[:, index]
        rows = layer_input_rows(weights.inputs, active, inputs, step)
        predictions[:, 1:].add_(rows[:, None])
    return predictions


@frozen(eq=False)
class BranchInputs:
    """Normalised rows [tokens, hidden] that sublayers read which read the same stream.
    None: each reads the residual stream as it is then, and normalises it.
    """

    attention: "Tensor | None" = None  # and what is recurrent beside it
    feed_forward: "Tensor | None" = None

    def select(self, keep: "Tensor") -> "BranchInputs":
        """Returns the inputs of the feed-forward for some tokens."""
        if self.feed_forward is None:
            return self
        return BranchInputs(None, self.feed_forward.index_select(0, keep))


SEQUENTIAL: Final = BranchInputs()


def branch_inputs(layer: Layer, weights: LayerWeights, hidden: "Tensor") -> BranchInputs:
    """Returns what the sublayers of a layer read, if they read the same stream."""
    attention, feed_forward = weights.attention, weights.feed_forward
    if attention is None or attention.norm is None:
        return SEQUENTIAL
    if layer.parallel and feed_forward is not None:
        x, own = normalise(hidden, attention.norm), feed_forward.norm
        return BranchInputs(x, x if own is None else normalise(hidden, own))
    if layer.recurrent is not None:
        return BranchInputs(normalise(hidden, attention.norm))
    return SEQUENTIAL


def mix_tokens(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    kept: KeptTokens | None = None,
    x: "Tensor | None" = None,
) -> "Tensor":
    """Returns the residual stream [tokens, hidden] with the attention and the recurrent
    sublayer of layer `index` added, those that it has: of the kept tokens, or of all.
    `x`: as in `BranchInputs`.
    """
    sizes, recurrent, mixed = layer.recurrent, weights.recurrent, None
    if sizes is not None and recurrent is not None:
        rows, norm = (hidden, recurrent.norm) if x is None else (x, None)
        mixed = mix_with_state(sizes, recurrent, rows, norm, index, step)
    match weights.attention:
        case GQAWeights() as gqa_weights:
            hidden = attend_gqa(gqa_weights, hidden, index, step, kept, x)
        case MLAWeights() as mla_weights:
            hidden = attend_mla(mla_weights, hidden, index, step, kept, x)
        case None if kept is not None:
            hidden = hidden.index_select(0, kept.tokens)
    if mixed is not None and recurrent is not None:
        if kept is not None:
            mixed, step = mixed.index_select(0, kept.tokens), kept.step
        add_product(hidden, mixed, recurrent.out, step.products, step.communicator)
    return hidden


def store_keys(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Write what the attention of layer `index` keeps of the residual stream `hidden`
    [tokens, hidden], or of normalised rows `x`, and compute nothing else of the layer.
    """
    match layer.attention, weights.attention:
        case GQA() as gqa, GQAWeights() as gqa_weights:
            store_gqa(gqa, gqa_weights, hidden, index, step, x)
        case _, MLAWeights() as mla_weights:
            store_mla(mla_weights, hidden, index, step, x)


def feed(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it; `x`: as in
    `BranchInputs`.
    """
    match layer.feed_forward, weights.feed_forward:
        case Dense(cutoff=None) as dense, DenseWeights() as dense_weights:
            feed_dense(dense, dense_weights, hidden, step, x)
        case Dense(cutoff=float(cutoff)) as dense, DenseWeights() as dense_weights:
            feed_sparse(dense, dense_weights, hidden, step, cutoff, x)
        case MoE() as moe, MoEWeights() as moe_weights:
            feed_moe(moe, moe_weights, hidden, step, x)


def finish(weights: LayerWeights, hidden: "Tensor", index: int, step: ModelStep) -> None:
    """Change the residual stream as a layer does behind its feed-forward."""
    if weights.inputs is not None and step.layer_inputs is not None:
        inputs = step.layer_inputs[:, index]
        hidden.add_(layer_input_rows(weights.inputs, hidden, inputs, step))
    if weights.scalar is not None:
        hidden.mul_(weights.scalar)
