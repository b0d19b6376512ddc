"""Chooses the kernels of products with leaves of weights: by scheme and device.

A model needs few products: with the norm before it inside, with the gate after it inside,
with its result added to the residual stream, and those of experts. Kernels decide what
they fuse; a scheme without a kernel is refused by name.

torch is imported with the first product: sizes of models are read without it.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.ranks import Communicator
from minfer.kernels.leaves import (
    Activation,
    ChosenExperts,
    ExpertRouter,
    Experts,
    GateActivation,
    HeadGate,
    Linear,
    Norm,
    WholeNorms,
)

if TYPE_CHECKING:
    from torch import Tensor


def norm_linear(
    x: "Tensor", norm: Norm | None, leaf: Linear, context: ProductContext
) -> "Tensor":
    """Returns the product with normalised rows: [tokens, inputs] -> [tokens, outputs].
    Without a norm, with the rows as they are.
    """
    if norm is None:
        return linear(x, leaf, context)
    product: Tensor = _kernels(leaf, on_gpu=context.on_gpu).norm_linear(x, norm, leaf)
    _add_adapters(product, x, leaf, context, norm)
    return product


def linear(x: "Tensor", leaf: Linear, context: ProductContext) -> "Tensor":
    """Returns the product [tokens, outputs] with rows [tokens, inputs]."""
    product: Tensor = _kernels(leaf, on_gpu=context.on_gpu).linear(x, leaf)
    _add_adapters(product, x, leaf, context)
    return product


def adapters_may_change(context: ProductContext, *leaves: Linear) -> bool:
    """Returns whether adapters of the step may change a product with any of the leaves:
    then nothing is fused with it that reads or changes its result.
    """
    return context.adapters is not None and any(
        leaf.adapters is not None for leaf in leaves
    )


def _add_adapters(
    product: "Tensor",
    x: "Tensor",
    leaf: Linear,
    context: ProductContext,
    norm: Norm | None = None,
) -> None:
    """Add what the rows' adapters add to a product with rows `x`, or normalised ones."""
    if context.adapters is not None and leaf.adapters is not None:
        module = _module("lora" if context.on_gpu else "plain_lora")
        module.add_lora(product, x, leaf.adapters, context.adapters, norm)


def feed(
    residual: "Tensor",
    norm: Norm | None,
    gate_up: Linear,
    down: Linear,
    activation: Activation,
    context: ProductContext,
    communicator: Communicator,
    after: Norm | None = None,
    x: "Tensor | None" = None,
) -> None:
    """Add activation(gate) * up of the residual stream [tokens, hidden], normalised if
    there is `norm`, and `gate_up`, multiplied with `down`, to it, as `add_product` does.

    x: rows [tokens, hidden] that are multiplied instead of the normalised stream.
    """
    x, norm = (residual, norm) if x is None else (x, None)
    kernels = _kernels(gate_up, on_gpu=context.on_gpu)
    adds_directly = communicator.rank_info.has_whole_matrices and after is None
    if adapters_may_change(context, gate_up, down):
        product = norm_linear(x, norm, gate_up, context)
        inner = activate(product, gate_up, activation, context)
        add_product(residual, inner, down, context, communicator, after)
    elif gate_up.scheme == down.scheme and hasattr(kernels, "feed"):
        out = residual if adds_directly else residual.new_zeros(residual.shape)
        kernels.feed(out, x, norm, gate_up, down, activation, context.fused)
        if not adds_directly:
            add_part(residual, out, communicator, after)
    else:
        inner = kernels.norm_gated(x, norm, gate_up, activation, fused=context.fused)
        add_product(residual, inner, down, context, communicator, after)


def gated(
    x: "Tensor", gate_up: Linear, activation: Activation, context: ProductContext
) -> "Tensor":
    """Returns activation(gate) * up of rows as they are."""
    return activate(linear(x, gate_up, context), gate_up, activation, context)


def activate(
    product: "Tensor", gate_up: Linear, activation: Activation, context: ProductContext
) -> "Tensor":
    """Returns activation(gate) * up of a product [tokens, 2 * inter] with `gate_up`."""
    kernels = _kernels(gate_up, on_gpu=context.on_gpu)
    activated: Tensor = kernels.gated_mul(product, activation)
    return activated


def add_product(
    residual: "Tensor",
    x: "Tensor",
    leaf: Linear,
    context: ProductContext,
    communicator: Communicator,
    after: Norm | None = None,
) -> None:
    """Add a product to the residual stream [tokens, outputs], summed over the ranks, and
    then normalised if there is `after`.

    A rank has some of the inputs, so its product is a part of each sum: the parts are
    summed over the ranks, then added. With one rank, the kernel adds the product.
    """
    if communicator.rank_info.has_whole_matrices and after is None:
        _kernels(leaf, on_gpu=context.on_gpu).linear_add(residual, x, leaf)
        _add_adapters(residual, x, leaf, context)
        return
    add_part(residual, linear(x, leaf, context), communicator, after)


def add_part(
    residual: "Tensor", partial: "Tensor", communicator: Communicator, after: Norm | None
) -> None:
    """Add this rank's part of a sum to the residual stream, as `add_product` does."""
    if after is None:
        communicator.add_sum(residual, partial)
    else:
        residual.add_(normalise(communicator.sum(partial), after))


def normalise(x: "Tensor", norm: Norm) -> "Tensor":
    """Returns the rows of `x` normalised."""
    name = "norm" if x.is_cuda else "plain"
    normalised: Tensor = _module(name).normalise(x, norm)
    return normalised


def norm_heads(
    qkv: "Tensor",
    norms: WholeNorms,
    context: ProductContext,
    communicator: Communicator,
) -> None:
    """Normalise the queries of all heads of all ranks together, and the keys, in place:
    `qkv` [tokens, queries + keys + values] of this rank's heads.
    """
    kernels = _module("heads_norm" if context.on_gpu else "plain")
    squares = None
    if not communicator.rank_info.has_whole_matrices:
        squares = communicator.sum(kernels.square_sums(qkv, norms))
    kernels.norm_heads(qkv, norms, squares, communicator.rank_info.parallel.tensor)


def gate_heads(
    attended: "Tensor",
    hidden: "Tensor",
    norm: Norm | None,
    gate: HeadGate,
    context: ProductContext,
) -> None:
    """Multiply what attention returned for the residual stream `hidden` with its gates,
    in place.
    """
    gates = norm_linear(hidden, norm, gate.linear, context)
    apply_gates(attended, gates, gate.activation, context)


def apply_gates(
    attended: "Tensor",
    gates: "Tensor",
    activation: GateActivation,
    context: ProductContext,
) -> None:
    """Multiply what attention returned with its gates, in place."""
    module = _module("head_gates" if context.on_gpu else "plain")
    module.gate_heads(attended, gates, activation)


def route(x: "Tensor", router: ExpertRouter, context: ProductContext) -> ChosenExperts:
    """Returns the experts of normalised tokens [tokens, hidden]; padding gets none."""
    name = "router" if context.on_gpu else "plain_experts"
    choice: ChosenExperts = _module(name).route(x, router, context.real)
    if router.expert_scale is not None:
        # An id of -1 is no expert, whatever its weight.
        index = (choice.ids + router.first_local).clamp(min=0).long()
        choice.weights.mul_(router.expert_scale[index])
    return choice


def add_experts(
    residual: "Tensor",
    x: "Tensor",
    experts: Experts,
    choice: ChosenExperts,
    context: ProductContext,
) -> None:
    """Add the weighted sum of each token's experts to `residual` [tokens, hidden]."""
    kernels = _kernels(experts.down, on_gpu=context.on_gpu, experts=True)
    if adapters_may_change(context, experts.gate_up, experts.down):
        kernels.add_experts(residual, x, experts, choice, adapters=context.adapters)
    else:
        kernels.add_experts(residual, x, experts, choice)


def in_kernel_layout(leaf: Linear) -> Linear:
    """Returns a leaf with loaded weights, in the layout of its kernels."""
    kernels = _kernels(leaf, on_gpu=leaf.weight.is_cuda, experts=leaf.weight.dim() == 3)
    prepare = getattr(kernels, "prepare", None)
    return leaf if prepare is None else prepare(leaf)


def _kernels(leaf: Linear, *, on_gpu: bool, experts: bool = False) -> Any:
    """Returns the module of kernels that multiplies with this leaf."""
    scheme = leaf.scheme
    matrices, mixtures = (
        (scheme.gpu, scheme.gpu_experts) if on_gpu else (scheme.cpu, scheme.cpu_experts)
    )
    if not (name := mixtures if experts else matrices):
        raise UnsupportedModelError(
            f"there are no kernels for {scheme.name} matrices on this device; use a "
            f"checkpoint in bfloat16, float16 or float32"
        )
    return _module(name)


@cache
def _module(name: str) -> Any:
    return import_module(f"minfer.kernels.{name}")
