"""The step of grouped-query attention: a function over its weights; see gqa.py."""

from typing import TYPE_CHECKING

from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.gqa_weights import GQAWeights
from minfer.effects.models.architecture.model_step import KeptTokens, ModelStep
from minfer.effects.models.architecture.products import (
    add_product,
    apply_gates,
    gate_heads,
    norm_heads,
    norm_linear,
)

if TYPE_CHECKING:
    from torch import Tensor


def store_gqa(
    sizes: GQA,
    weights: GQAWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Write keys and values of layer `index` for the residual stream `hidden` [tokens,
    hidden], or for normalised rows `x`, as `attend_gqa` does.
    """
    leaf, first_key = weights.qkv, sizes.first_gates + sizes.q_size
    can_leave_out = leaf.scheme.is_plain and leaf.packed is None
    if can_leave_out and weights.whole_norms is None:
        leaf, first_key = leaf.select(slice(first_key, None)), 0
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    qkv = norm_linear(source, norm, leaf, step.products)
    if weights.whole_norms is not None:
        norm_heads(qkv, weights.whole_norms, step.products, step.communicator)
    step.cache.store(step.batch, index, qkv[:, first_key:], weights.heads)


def attend_gqa(
    weights: GQAWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    kept: KeptTokens | None,
    x: "Tensor | None" = None,
) -> "Tensor":
    """Returns the residual stream with the attention of layer `index` added: of the
    kept tokens, or of all; that of normalised rows `x`, if there are any.
    """
    source, norm = (hidden, weights.norm) if x is None else (x, None)
    qkv, gates = norm_linear(source, norm, weights.qkv, step.products), None
    if weights.first_gates is not None:
        size = weights.out.inputs
        gates, qkv = qkv[:, :size], qkv[:, size:]
    if weights.whole_norms is not None:
        norm_heads(qkv, weights.whole_norms, step.products, step.communicator)
    attended = step.cache.rotate_and_attend(step.batch, index, qkv, weights.heads)
    if kept is not None:
        # Of the other tokens, only keys and values are needed.
        keep, step = kept.tokens, kept.step
        hidden, attended = hidden.index_select(0, keep), attended.index_select(0, keep)
        gates = None if gates is None else gates.index_select(0, keep)
    if weights.first_gates is not None and gates is not None:
        apply_gates(attended, gates, weights.first_gates, step.products)
    if weights.gate is not None:
        gate_heads(attended, hidden, weights.norm, weights.gate, step.products)
    add_product(
        hidden, attended, weights.out, step.products, step.communicator, weights.after
    )
    return hidden
