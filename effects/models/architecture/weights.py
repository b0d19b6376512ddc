"""Weights as a frozen tree: norms and embeddings are tensors, matrices `Linear`s."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from minfer.effects.models.architecture.layers import (
    LayerWeights,
    empty_layer,
    layer_parts,
)
from minfer.effects.models.architecture.linear import Maker, matrix_parts, norm_part
from minfer.effects.models.architecture.quantization import PLAIN_FILES, Files
from minfer.effects.models.architecture.spec import (
    EMBED,
    LM_HEAD,
    ModelSpec,
    layer_prefix,
)
from minfer.effects.models.parts import Part
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
    lm_head: Linear  # vocab outputs of hidden inputs; of a rank, likewise


def empty_weights(spec: ModelSpec, dtype: str, device: str = "cpu") -> Weights:
    """Returns uninitialised weights of the right shapes, to be filled through
    `named_parts`.

    `dtype` is that of activations, and of what is not quantized.
    """
    make = Maker(
        dtype=dtype,
        device=device,
        quantization=spec.quantization,
        ranks=spec.place.parallel.tensor,
    )
    layers = tuple(
        empty_layer(layer, evolve(make, prefix=layer_prefix(i)))
        for i, layer in enumerate(spec.layers, spec.first_layer)
    )
    embed = head = make.matrix(spec.embed_rows, spec.hidden_size)
    if not spec.tie_word_embeddings:
        head = make.matrix(spec.head_rows, spec.hidden_size)
    lm_head = Linear(weight=head, parts=(len(head),))
    return Weights(embed, layers, make.norm(spec.hidden_size, spec.norms), lm_head)


def checkpoint_parts(
    spec: ModelSpec, weights: Weights, files: Files = PLAIN_FILES
) -> Iterator[Part]:
    """Yield the tensors of a checkpoint, with their places."""
    if spec.embed_rows:
        yield Part(EMBED, weights.embed)
    layers = zip(spec.layers, weights.layers, strict=True)
    for i, (layer, its) in enumerate(layers, spec.first_layer):
        for part in layer_parts(layer, its, files):
            yield part.under(layer_prefix(i))
    yield norm_part("model.norm", weights.norm, spec.norms)
    if spec.head_rows and not spec.tie_word_embeddings:
        yield Part(LM_HEAD, weights.lm_head.weight)


def expected_parts(spec: ModelSpec, files: Files = PLAIN_FILES) -> dict[str, Part]:
    """Returns the tensors that a checkpoint has to have, by the model's names, without
    memory: of a model that transformers runs and loads, those of quantized matrices.
    """
    parts = leaf_parts(empty_leaves(spec, "meta"), files)
    if not spec.parameters:
        parts = checkpoint_parts(spec, empty_weights(spec, spec.dtype, "meta"), files)
    return {part.name: part for part in parts}


def empty_leaves(spec: ModelSpec, device: str = "cpu") -> dict[str, Linear]:
    """Returns the quantized matrices of a model that transformers runs, uninitialised, by
    their names.
    """
    make = Maker(spec.dtype, device, spec.quantization)
    quantized = (one for one in spec.linears if not spec.scheme_of(one).is_plain)
    return {sizes.names[0]: make.linear(sizes) for sizes in quantized}


def leaf_parts(leaves: Mapping[str, Linear], files: Files) -> Iterator[Part]:
    """Yields the tensors of a checkpoint that belong to matrices of these names."""
    for name, leaf in leaves.items():
        yield from matrix_parts(name, leaf, files)
        if leaf.bias is not None:
            yield Part(f"{name}.bias", leaf.bias)


def named_parts(
    spec: ModelSpec, weights: Weights
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield each tensor's name in an unquantized checkpoint, and its place: a view into
    the fused tensors.
    """
    for part in checkpoint_parts(spec, weights):
        yield part.name, part.place
