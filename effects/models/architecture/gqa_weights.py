"""The weights of grouped-query attention, and a checkpoint's tensors in them: gqa.py."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.linear import (
    WeightMaker,
    bias_parts,
    norm_part,
    sublayer_norm_parts,
    weight_parts,
)
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import (
    GateActivation,
    HeadGate,
    HeadWeights,
    Linear,
    Norm,
    WholeNorms,
)

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False, kw_only=True)
class GQAWeights:
    """The weights of one layer's attention."""

    norm: Norm | None  # [hidden], of the input
    qkv: Linear
    whole_norms: WholeNorms | None = None  # of the queries and keys of all heads
    heads: HeadWeights
    gate: HeadGate | None = None
    # What gates go through that `qkv` returns before the queries; None: it returns none.
    first_gates: GateActivation | None = None
    out: Linear
    after: Norm | None = None  # [hidden], of the result


def empty_gqa(sizes: GQA, make: WeightMaker) -> GQAWeights:
    """Returns uninitialised weights of these sizes."""

    each_head = sizes.qk_norm and sizes.qk_norm_over == "head"
    whole_norms = None
    if sizes.qk_norm and not each_head:
        whole_norms = WholeNorms(
            make.norm(sizes.q_size, sizes.norms), make.norm(sizes.kv_size, sizes.norms)
        )

    def head_norm(heads: int) -> Norm | None:
        if sizes.unit_heads is not None:
            return Norm(make.vector(sizes.head_dim).fill_(1), sizes.unit_heads)
        if not each_head:
            return None
        own = heads if sizes.qk_norm_factors != "shared" else 0
        return make.norm(sizes.head_dim, evolve(sizes.norms, bias=False), own)

    before, after = make.sublayer_norms(sizes.hidden_size, sizes.norms)
    return GQAWeights(
        norm=before,
        qkv=make.linear(sizes.qkv),
        whole_norms=whole_norms,
        heads=HeadWeights(
            q_norm=head_norm(sizes.heads),
            k_norm=head_norm(sizes.kv_heads) if sizes.new_kv_heads else None,
            v_norm=make.unit_norm(sizes.head_dim, sizes.norms)
            if sizes.unit_elements
            else None,
            norms_after_rope=sizes.qk_norm_after_rope,
            sinks=make.vector(sizes.heads, "float32") if sizes.sinks else None,
        ),
        gate=_empty_gate(sizes, make),
        first_gates=sizes.gate.activation if sizes.gate and sizes.first_gates else None,
        out=make.linear(sizes.out),
        after=after,
    )


def _empty_gate(sizes: GQA, make: WeightMaker) -> HeadGate | None:
    """Returns the uninitialised gates of these sizes, if there are any."""
    if sizes.gate is None or sizes.gate_matrix is None:
        return None
    return HeadGate(make.linear(sizes.gate_matrix), sizes.gate.activation)


def gqa_parts(
    sizes: GQA, weights: GQAWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    norms, heads = sizes.norms, weights.heads
    yield from sublayer_norm_parts(weights.norm, weights.after, norms)
    order = None if sizes.rope is None else sizes.rope.order(sizes.head_dim)
    for weight_part in (
        *weight_parts(sizes.qkv, weights.qkv, form),
        *bias_parts(sizes.qkv, weights.qkv),
    ):
        if sizes.stored_qkv:
            if sizes.qkv_by_key_head:
                queries_first = weight_part.rearranged(_queries_first(sizes))
                weight_part = evolve(queries_first, pieces=())
            yield _ordered(weight_part, order, sizes.qkv.outputs)
            continue
        if weight_part.name.startswith("self_attn.v_proj"):
            yield weight_part
        elif sizes.first_gates and weight_part.name.startswith("self_attn.q_proj"):
            yield weight_part.rearranged(_gates_first(sizes, order))
        else:
            yield _ordered(weight_part, order)
    q_norm, k_norm = heads.q_norm, heads.k_norm
    if weights.whole_norms is not None:
        q_norm, k_norm = weights.whole_norms.query, weights.whole_norms.key
    firsts = (sizes.first_head, sizes.first_kv_head)
    for name, norm, first in zip(
        sizes.qk_norm_names, (q_norm, k_norm), firsts, strict=True
    ):
        if norm is not None and sizes.qk_norm:
            yield from _head_norm_parts(sizes, name, norm, first, order)
    if heads.sinks is not None:
        yield WeightPart(f"self_attn.{sizes.sinks_name}", heads.sinks)
    if weights.gate is not None and (gate_matrix := sizes.gate_matrix):
        yield from weight_parts(gate_matrix, weights.gate.linear, form)
    yield from weight_parts(sizes.out, weights.out, form)
    yield from bias_parts(sizes.out, weights.out)


def _queries_first(sizes: GQA) -> "Callable[[Tensor], Tensor]":
    """Returns what turns outputs, in which the queries of each key head, the key and the
    value follow one another, to all queries, all keys, all values.
    """

    def arrange(stored: "Tensor") -> "Tensor":
        import torch

        group = sizes.heads // sizes.kv_heads + 2
        shape = (sizes.kv_heads, group, sizes.head_dim, *stored.shape[1:])
        kinds = stored.reshape(shape).split_with_sizes([group - 2, 1, 1], 1)
        return torch.cat([of_kind.flatten(0, 2) for of_kind in kinds])

    return arrange


def _gates_first(sizes: GQA, order: list[int] | None) -> "Callable[[Tensor], Tensor]":
    """Returns what turns outputs, in which each head has its query and then its gates, to
    all gates, all queries, the dimensions of each query in `order`.
    """

    def arrange(stored: "Tensor") -> "Tensor":
        import torch

        by_head = stored.reshape(-1, 2, sizes.head_dim, *stored.shape[1:])
        queries, gates = by_head.unbind(1)
        if order is not None:
            queries = queries[:, order]
        return torch.cat((gates.flatten(0, 1), queries.flatten(0, 1)))

    return arrange


def _head_norm_parts(
    sizes: GQA, name: str, norm: Norm, first: int, order: list[int] | None
) -> Iterator[WeightPart]:
    """Yields the tensors of a norm of heads, whose numbers begin with `first`, the
    dimensions of each in `order`.
    """

    def ordered(stored: "Tensor") -> "Tensor":
        return stored[..., order]

    if sizes.qk_norm_factors == "listed":
        for head, factors in enumerate(norm.weight, first):
            of_head = evolve(norm, weight=factors)
            yield _ordered(norm_part(f"{name}.{head}", of_head, sizes.norms), order)
    elif sizes.qk_norm_factors == "stacked":
        stacked = norm_part(name, norm, sizes.norms)
        yield stacked.rearranged(None if order is None else ordered)
    else:
        yield _ordered(norm_part(name, norm, sizes.norms), order)


def _ordered(
    weight_part: WeightPart, order: list[int] | None, outputs: tuple[int, ...] = ()
) -> WeightPart:
    """Returns a part of queries or keys, the dimensions of its heads in `order`; or of
    queries, keys and values of so many `outputs`, which are stored as one.
    """
    if order is None:
        return weight_part

    def ordered(stored: "Tensor") -> "Tensor":
        by_head = stored.reshape(-1, len(order), *stored.shape[1:])
        return by_head[:, order].reshape(stored.shape)

    def ordered_but_values(stored: "Tensor") -> "Tensor":
        import torch

        query, key, value = stored.split_with_sizes(outputs)
        return torch.cat((ordered(query), ordered(key), value))

    return weight_part.rearranged(ordered_but_values if outputs else ordered)
