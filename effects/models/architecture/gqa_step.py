"""The step of grouped-query attention: a function over its weights; see gqa.py."""

from typing import TYPE_CHECKING

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
