"""Weights as a frozen tree: norms and embeddings are tensors, matrices `Linear`s."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.altup import (
    StreamProjections,
    empty_projections,
    projection_parts,
)
from minfer.effects.models.architecture.layer_inputs import (
    InputTableWeights,
    empty_input_table,
    input_table_parts,
)
from minfer.effects.models.architecture.layers import (
    LayerWeights,
    empty_layer,
    layer_parts,
)
from minfer.effects.models.architecture.linear import (
    WeightMaker,
    matrix_parts,
    norm_parts,
)
from minfer.effects.models.architecture.quantization import PLAIN_FORM, CheckpointForm
from minfer.effects.models.architecture.spec import (
    EMBED,
    HEAD_BIAS,
    LM_HEAD,
    ModelSpec,
    layer_prefix,
)
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Norm

if TYPE_CHECKING:
    import torch


@frozen(eq=False)
class Weights:
    """A model's weights; `lm_head` multiplies with `embed` itself when the embeddings are
    tied.
    """

    embed: "torch.Tensor"  # [vocab, hidden]; of a rank, its rows, or none
    layers: tuple[LayerWeights, ...]
    norm: Norm  # [hidden]
    lm_head: Linear  # vocab outputs of hidden inputs; of a rank, its outputs
    input_table: InputTableWeights | None = None
    projections: StreamProjections | None = None  # of several residual streams


def empty_weights(spec: ModelSpec, dtype: str, device: str = "cpu") -> Weights:
    """Returns uninitialised weights of the right shapes, to be filled through
    `checkpoint_parts`.

    `dtype` is that of activations, and of what is not quantized.
    """
    make = WeightMaker(
        dtype=dtype,
        device=device,
        quantization=spec.quantization,
        ranks=spec.rank_info.parallel.tensor,
    )
    layers = tuple(
        empty_layer(layer, evolve(make, prefix=layer_prefix(i)))
        for i, layer in enumerate(spec.layers, spec.first_layer)
    )
    embed = head = make.matrix(spec.embed_rows, spec.hidden_size)
    if not spec.tie_word_embeddings:
        head = make.matrix(spec.head_rows, spec.hidden_size)
    bias = make.vector(len(head)) if spec.head_bias and spec.head_rows else None
    lm_head = Linear(weight=head, bias=bias, parts=(len(head),))
    table = spec.input_table
    inputs = None if table is None else empty_input_table(table, make)
    norm = make.norm(spec.hidden_size, spec.norms.of_stream)
    projections = None if spec.altup is None else empty_projections(spec.altup, make)
    return Weights(embed, layers, norm, lm_head, inputs, projections)


def checkpoint_parts(
    spec: ModelSpec, weights: Weights, form: CheckpointForm = PLAIN_FORM
) -> Iterator[WeightPart]:
    """Yields the tensors of a checkpoint, with their targets."""
    if spec.embed_rows:
        yield WeightPart(EMBED, weights.embed)
    if spec.input_table is not None and weights.input_table is not None:
        yield from input_table_parts(spec.input_table, weights.input_table)
    if weights.projections is not None:
        yield from projection_parts(weights.projections)
    layers = zip(spec.layers, weights.layers, strict=True)
    for i, (layer, layer_weights) in enumerate(layers, spec.first_layer):
        for weight_part in layer_parts(layer, layer_weights, form):
            yield weight_part.with_prefix(layer_prefix(i))
    yield from norm_parts("model.norm", weights.norm, spec.norms)
    if spec.head_rows and not spec.tie_word_embeddings:
        yield WeightPart(LM_HEAD, weights.lm_head.weight)
    if weights.lm_head.bias is not None:
        yield WeightPart(HEAD_BIAS, weights.lm_head.bias)


def expected_parts(
    spec: ModelSpec, form: CheckpointForm = PLAIN_FORM
) -> dict[str, WeightPart]:
    """Returns the tensors that a checkpoint has to have, by the model's names, without
    memory: of a model that transformers runs and loads, those of quantized matrices.
    """
    weight_parts = leaf_parts(empty_leaves(spec, "meta"), form)
    if not spec.parameters:
        weight_parts = checkpoint_parts(
            spec, empty_weights(spec, spec.dtype, "meta"), form
        )
    return {weight_part.name: weight_part for weight_part in weight_parts}


def empty_leaves(spec: ModelSpec, device: str = "cpu") -> dict[str, Linear]:
    """Returns the quantized matrices of a model that transformers runs, uninitialised, by
    their names.
    """
    make = WeightMaker(spec.dtype, device, spec.quantization)
    quantized = (sizes for sizes in spec.linears if not spec.scheme_of(sizes).is_plain)
    return {sizes.names[0]: make.linear(sizes) for sizes in quantized}


def leaf_parts(
    leaves: Mapping[str, Linear], form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a checkpoint that belong to matrices of these names."""
    for name, leaf in leaves.items():
        yield from matrix_parts(name, leaf, form)
        if leaf.bias is not None:
            yield WeightPart(f"{name}.bias", leaf.bias)


def named_parts(
    spec: ModelSpec, weights: Weights
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yields each tensor's name in an unquantized checkpoint, and its target: a view into
    the fused tensors.
    """
    for weight_part in checkpoint_parts(spec, weights):
        yield weight_part.name, weight_part.target
