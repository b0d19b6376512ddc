"""The weights of a mixture of experts, and a checkpoint's tensors in them; see moe.py.

Theory. A single shared expert that is as wide as the others is stored behind them, in the
same tensors, so that a step can use it as one more of them or by itself (moe_step.py).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.dense import (
    Dense,
    DenseWeights,
    dense_matrix_parts,
    dense_parts,
    empty_dense,
)
from minfer.effects.models.architecture.linear import (
    WeightMaker,
    bias_parts,
    matrix_parts,
    norm_part,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import ExpertRouter, Experts, Linear, Norm

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False, kw_only=True)
class SharedWeights:
    """The shared experts."""

    gate_up: Linear
    down: Linear
    gate: Linear | None  # weighs them: one output


@frozen(eq=False)
class WithShared:
    """The experts with the shared one behind them: `MoEWeights.experts` and
    `MoEWeights.shared` are parts of the same memory.
    """

    router: ExpertRouter  # chooses the shared expert for each token, too
    experts: Experts


@frozen(eq=False, kw_only=True)
class BesideWeights:
    """A dense feed-forward beside the experts, and what belongs to both."""

    dense: DenseWeights
    router_norm: Norm  # [hidden], of the router's input
    result: Norm  # [hidden], of the experts' result


@frozen(eq=False)
class LatentProducts:
    """The products to the width of experts, and back."""

    to_latent: Linear
    from_latent: Linear


@frozen(eq=False, kw_only=True)
class MoEWeights:
    """The weights of one layer's mixture of experts."""

    norm: Norm | None  # [hidden], of the input
    router: ExpertRouter
    experts: Experts
    shared: SharedWeights | None
    with_shared: WithShared | None = None  # for few tokens
    after: Norm | None = None  # [hidden], of the result
    beside: BesideWeights | None = None
    latent: LatentProducts | None = None


def empty_moe(sizes: MoE, make: WeightMaker) -> MoEWeights:
    """Returns uninitialised weights of these sizes."""
    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    router = _empty_router(sizes, make)
    shared: SharedWeights | None
    with_shared: WithShared | None = None
    if sizes.shared is not None and _is_stored_behind(sizes, sizes.shared, make):
        experts, shared, with_shared = _empty_with_shared(sizes, router, make)
    else:
        experts, shared = _empty_experts(sizes, make), _empty_shared(sizes, make)
    return MoEWeights(
        norm=before,
        router=router,
        experts=experts,
        shared=shared,
        with_shared=with_shared,
        after=after,
        beside=None if sizes.beside is None else _empty_beside(sizes, sizes.beside, make),
        latent=_empty_latent(sizes, make),
    )


def _empty_router(sizes: MoE, make: WeightMaker) -> ExpertRouter:
    """Returns an uninitialised router."""
    keys, count, rank_experts = sizes.keys, sizes.experts, sizes.rank_experts
    return ExpertRouter(
        weight=make.tensor(
            count, sizes.hidden_size, dtype="float32" if keys.routing.float32 else None
        ),
        bias=make.vector(count) if keys.bias else None,
        correction=make.vector(count, "float32") if keys.routing.correction else None,
        expert_scale=None if sizes.beside is None else make.vector(count),
        rule=sizes.rule,
        first_local=0 if rank_experts is None else rank_experts.start,
        num_local=None if rank_experts is None else len(rank_experts),
    )


def _empty_experts(sizes: MoE, make: WeightMaker, more: int = 0) -> Experts:
    """Returns the uninitialised experts of a rank, and `more` behind them."""
    count = sizes.num_rank_experts + more
    return Experts(
        gate_up=make.linear(evolve(sizes.gate_up, experts=count)),
        down=make.linear(evolve(sizes.down, experts=count)),
        activation=sizes.activation,
        weighs_inputs=sizes.keys.routing.weighs_inputs,
    )


def _empty_shared(sizes: MoE, make: WeightMaker) -> SharedWeights | None:
    """Returns uninitialised shared experts, if there are any."""
    if sizes.shared is None:
        return None
    return SharedWeights(
        gate_up=make.linear(sizes.shared.gate_up),
        down=make.linear(sizes.shared.down),
        gate=_empty_shared_gate(sizes, make),
    )


def _empty_shared_gate(sizes: MoE, make: WeightMaker) -> Linear | None:
    """Returns the uninitialised gate of shared experts, if they have one."""
    if not sizes.keys.shared.gate:
        return None
    return Linear(weight=make.matrix(1, sizes.hidden_size), parts=(1,))


def _is_stored_behind(sizes: MoE, shared: Dense, make: WeightMaker) -> bool:
    """Returns whether the shared expert is stored behind a rank's experts: if its
    matrices have the same sizes and the same quantization. On the CPU, quantized matrices
    are packed one by one, so they cannot be parts of one tensor.
    """
    if not sizes.has_equal_shared or not make.has_memory:
        return False
    for expert, of_shared in (
        (sizes.gate_up, shared.gate_up),
        (sizes.down, shared.down),
    ):
        scheme = make.scheme(expert)
        if scheme != make.scheme(of_shared):
            return False
        if make.device == "cpu" and not scheme.is_plain:
            return False
    return True


def _empty_with_shared(
    sizes: MoE, router: ExpertRouter, make: WeightMaker
) -> tuple[Experts, SharedWeights, WithShared]:
    """Returns uninitialised experts, the shared one behind them, and all together."""
    every, count = _empty_experts(sizes, make, more=1), sizes.num_rank_experts
    experts = evolve(
        every,
        gate_up=every.gate_up.select(slice(count)),
        down=every.down.select(slice(count)),
    )
    gate = _empty_shared_gate(sizes, make)
    shared = SharedWeights(
        gate_up=every.gate_up.select(count), down=every.down.select(count), gate=gate
    )
    router = evolve(
        router, shared=True, shared_gate=None if gate is None else gate.weight
    )
    return experts, shared, WithShared(router, every)


def _empty_latent(sizes: MoE, make: WeightMaker) -> LatentProducts | None:
    """Returns uninitialised products to the width of experts and back, if there are
    any.
    """
    if sizes.to_latent is None or sizes.from_latent is None:
        return None
    return LatentProducts(make.linear(sizes.to_latent), make.linear(sizes.from_latent))


def _empty_beside(sizes: MoE, dense: Dense, make: WeightMaker) -> BesideWeights:
    """Returns uninitialised weights of a feed-forward beside experts."""
    router_norm = Norm(make.vector(sizes.hidden_size, "float32"), sizes.norms.eps)
    return BesideWeights(
        dense=empty_dense(dense, make),
        router_norm=router_norm,
        result=make.norm(sizes.hidden_size, sizes.norms),
    )


def moe_parts(
    sizes: MoE, weights: MoEWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets: the matrices of
    experts one by one, or stacked, those of all experts as one tensor.
    """
    keys, router, shared = sizes.keys, weights.router, weights.shared
    yield from sublayer_norm_parts(weights.norm, weights.after, sizes.norms)
    yield WeightPart(f"{keys.stored.router}.weight", router.weight)
    if router.bias is not None:
        yield WeightPart(f"{keys.stored.router}.bias", router.bias)
    if router.correction is not None:
        correction = router.correction
        yield WeightPart(
            keys.routing.correction,
            correction[None] if keys.routing.correction_rows else correction,
        )
    is_stacked = keys.stored.stacked if form.stacked is None else form.stacked
    if sizes.beside is not None and weights.beside is not None:
        yield from _beside_parts(sizes, sizes.beside, weights, weights.beside, form)
    if weights.latent is not None:
        yield from _latent_parts(sizes, weights.latent, form)
    expert_parts = _stacked_parts if is_stacked or keys.stored.stacks else _single_parts
    yield from expert_parts(sizes, weights.experts, form)
    if sizes.shared is not None and shared is not None:
        yield from dense_matrix_parts(sizes.shared, shared.gate_up, shared.down, form)
        if shared.gate is not None:
            yield WeightPart(f"{keys.shared.name}_gate.weight", shared.gate.weight)


def _latent_parts(
    sizes: MoE, latent: LatentProducts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of the products to the width of experts and back. Ranks sum what
    the latter returns, so one of them adds its bias.
    """
    if (to_latent := sizes.to_latent) is not None:
        yield from weight_parts(to_latent, latent.to_latent, form)
        yield from bias_parts(to_latent, latent.to_latent)
    if (from_latent := sizes.from_latent) is not None:
        yield from weight_parts(from_latent, latent.from_latent, form)
        for part in bias_parts(from_latent, latent.from_latent):
            yield evolve(part, on_one_rank=True)


def _beside_parts(
    sizes: MoE,
    dense: Dense,
    weights: MoEWeights,
    beside: BesideWeights,
    form: CheckpointForm,
) -> Iterator[WeightPart]:
    """Yields the tensors of a feed-forward beside experts, and of what both have."""
    root, router = sizes.hidden_size**-0.5, sizes.keys.stored.router.rpartition(".")[0]

    def scaled(stored: "Tensor") -> "Tensor":
        return stored.float().mul_(root)

    yield from dense_parts(dense, beside.dense, form)
    yield WeightPart(f"{router}.scale", beside.router_norm.weight, scaled)
    if weights.router.expert_scale is not None:
        yield WeightPart(f"{router}.per_expert_scale", weights.router.expert_scale)
    if sizes.keys.beside is not None:
        name = sizes.keys.beside.experts_result
        yield norm_part(name, beside.result, sizes.norms)


def _single_parts(
    sizes: MoE, experts: Experts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of each expert."""
    gate, up, down = sizes.keys.stored.matrices
    names = (gate, up, down) if sizes.gated else (up, down)
    for index, expert in enumerate(sizes.rank_experts or range(sizes.experts)):
        leaves = (*experts.gate_up.select(index).pieces(), experts.down.select(index))
        for name, leaf in zip(names, leaves, strict=True):
            matrix = f"{sizes.keys.stored.experts}.{expert}.{name}"
            yield from matrix_parts(matrix, leaf, form)
            if leaf.bias is not None:
                is_summed = name == down and sizes.rank_experts is None
                yield WeightPart(f"{matrix}.bias", leaf.bias, on_one_rank=is_summed)


def _stacked_parts(
    sizes: MoE, experts: Experts, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of all experts."""
    stored = sizes.keys.stored
    transposed = stored.transposed or (stored.maybe_transposed and form.transposed)
    alternate = _gates_first if stored.alternating else None
    # Alternating gates and ups are divided as one matrix.
    num_fused = 1 if stored.alternating or not sizes.gated else 2
    gate_up, down = stored.stacks or (
        f"{stored.experts}.{'gate_up_proj' if sizes.gated else 'up_proj'}",
        f"{stored.experts}.down_proj",
    )
    for matrix, leaf, sizes_of, order, fused in (
        (gate_up, experts.gate_up, sizes.gate_up, alternate, num_fused),
        (down, experts.down, sizes.down, None, 1),
    ):
        for weight_part in _stack_parts(matrix, leaf, form, transposed=transposed):
            matrix_name = sizes_of.names[0]
            yield evolve(weight_part, matrix=matrix_name, fused=fused).rearranged(order)
        if leaf.bias is not None:
            is_summed = matrix == down and sizes.rank_experts is None
            bias = WeightPart(
                f"{matrix}_bias", leaf.bias, fused=fused, on_one_rank=is_summed
            )
            yield bias.rearranged(order)


def _stack_parts(
    matrix: str, leaf: Linear, form: CheckpointForm, *, transposed: bool
) -> Iterator[WeightPart]:
    """Yields the tensors of one matrix of all experts; those with full numbers may be
    [experts, in, out].
    """
    if leaf.scheme.is_plain:
        weight_parts = iter([WeightPart(matrix, leaf.weight)])
    else:
        weight_parts = form.format_of(matrix).expert_parts(matrix, leaf)
    for weight_part in weight_parts:
        if transposed and weight_part.name == matrix:
            experts, outputs, inputs = weight_part.shape
            yield evolve(
                weight_part, shape=(experts, inputs, outputs), arrange=_transposed
            )
        else:
            yield evolve(weight_part, scales=weight_part.target is leaf.scales)


def _transposed(stored: "Tensor") -> "Tensor":
    """Returns [experts, out, in] of [experts, in, out]."""
    return stored.transpose(1, 2)


def _gates_first(stored: "Tensor") -> "Tensor":
    """Returns gates, then ups, of [experts, 2 * inter, ...] where they alternate."""
    shape = stored.shape
    paired = stored.reshape(shape[0], -1, 2, *shape[2:])
    return paired.transpose(1, 2).reshape(shape)
