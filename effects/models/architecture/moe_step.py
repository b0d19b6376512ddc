"""The step of a mixture of experts: a function over its weights; see moe.py.

Theory. At few tokens a step reads the experts that are hit, E * (1 - (1 - k / E)^tokens)
of E if tokens choose k independently; a dense layer of as many parameters would read all.

A shared expert that is stored behind the others (moe_weights.py) is used in two ways. In
steps of few tokens it is one more expert of each token, and has no launches of its own.
In steps of many it is a dense feed-forward, whose products are faster than those of
experts.
"""

from typing import TYPE_CHECKING, Final

from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_weights import (
    BesideWeights,
    LatentProducts,
    MoEWeights,
    SharedWeights,
    WithShared,
)
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import (
    adapters_may_change,
    add_experts,
    add_part,
    add_product,
    feed,
    gated,
    linear,
    normalise,
    route,
)
from minfer.effects.models.ranks import SINGLE_RANK
from minfer.kernels.leaves import ChosenExperts, Experts

if TYPE_CHECKING:
    from torch import Tensor

# Up to this many tokens of a step, a shared expert is one more of each token's experts.
# An estimate: with more, the products of experts are slower than cuBLAS by more than the
# saved launches take.
MAX_TOKENS_WITH_SHARED: Final = 256


def feed_moe(
    sizes: MoE,
    weights: MoEWeights,
    hidden: "Tensor",
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Add the mixture of experts of `hidden` [tokens, hidden] to it, or that of
    normalised rows `x`.
    """
    if weights.beside is not None:
        _feed_beside(sizes, weights, weights.beside, hidden, step)
        return
    if x is None:
        x = hidden if weights.norm is None else normalise(hidden, weights.norm)
    adds_directly = (
        step.communicator.rank_info.has_whole_matrices and weights.after is None
    )
    total = hidden if adds_directly else hidden.new_zeros(hidden.shape)
    if (with_shared := _with_shared(weights, len(x), step.products)) is not None:
        choice = route(x, with_shared.router, step.products)
        add_experts(total, x, with_shared.experts, choice, step.products)
    else:
        _add_routed(weights, total, x, step.products)
        if weights.shared is not None:
            _add_shared(sizes, weights.shared, total, x, step.products)
    if not adds_directly:
        add_part(hidden, total, step.communicator, weights.after)


def _with_shared(
    weights: MoEWeights, tokens: int, context: ProductContext
) -> WithShared | None:
    """Returns the experts with the shared one behind them, if this number of tokens uses
    them so; not if adapters may change them, which know it as a dense feed-forward.
    """
    experts, shared = weights.experts, weights.shared
    if weights.with_shared is None or shared is None or tokens > MAX_TOKENS_WITH_SHARED:
        return None
    matrices = experts.gate_up, experts.down, shared.gate_up, shared.down
    return None if adapters_may_change(context, *matrices) else weights.with_shared


def _add_routed(
    weights: MoEWeights, total: "Tensor", x: "Tensor", context: ProductContext
) -> None:
    """Add the experts that the router chooses for normalised tokens `x`."""
    choice = route(x, weights.router, context)
    if weights.latent is None:
        add_experts(total, x, weights.experts, choice, context)
    else:
        _add_latent(weights.experts, weights.latent, choice, total, x, context)


def _add_latent(
    experts: Experts,
    latent: LatentProducts,
    choice: ChosenExperts,
    total: "Tensor",
    x: "Tensor",
    context: ProductContext,
) -> None:
    """Add the experts of normalised tokens `x`, which have a width of their own."""
    inputs = linear(x, latent.to_latent, context)
    results = inputs.new_zeros(inputs.shape)
    add_experts(results, inputs, experts, choice, context)
    add_product(total, results, latent.from_latent, context, SINGLE_RANK)


def _feed_beside(
    sizes: MoE,
    weights: MoEWeights,
    beside: BesideWeights,
    hidden: "Tensor",
    step: ModelStep,
) -> None:
    """Add experts and a dense feed-forward beside them to `hidden` [tokens, hidden]."""
    dense, tokens = beside.dense, len(hidden)
    # Ranks sum the parts of both at once.
    parts = hidden.new_zeros(2 * tokens, hidden.shape[1])
    x = hidden if dense.norm is None else normalise(hidden, dense.norm)
    inner = gated(x, dense.gate_up, sizes.activation, step.products)
    parts[:tokens] = linear(inner, dense.down, step.products)
    x = hidden if weights.norm is None else normalise(hidden, weights.norm)
    routed = normalise(hidden, beside.router_norm)
    choice = route(routed, weights.router, step.products)
    add_experts(parts[tokens:], x, weights.experts, choice, step.products)
    if not step.communicator.rank_info.has_whole_matrices:
        parts = step.communicator.sum(parts)
    result = normalise(parts[tokens:], beside.result)
    of_dense = parts[:tokens]
    result.add_(of_dense if dense.after is None else normalise(of_dense, dense.after))
    hidden.add_(result if weights.after is None else normalise(result, weights.after))


def _add_shared(
    sizes: MoE,
    shared: SharedWeights,
    total: "Tensor",
    x: "Tensor",
    context: ProductContext,
) -> None:
    """Add the shared experts of normalised tokens `x`; of ranks, this one's part."""
    gate_up, down, gate = shared.gate_up, shared.down, shared.gate
    if gate is None:
        feed(total, None, gate_up, down, sizes.activation, context, SINGLE_RANK, x=x)
        return
    inner = gated(x, gate_up, sizes.activation, context)
    inner = inner * linear(x, gate, context).sigmoid()
    add_product(total, inner, down, context, SINGLE_RANK)
