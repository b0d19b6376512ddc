"""Inputs of layers beside the residual stream (Gemma 3n and 4): sizes, weights, steps.

Theory. Each layer has embeddings of its own, small ones: a token's line of one table has
a part for each layer. To it is added a projection of the token's embedding, normalised;
so a layer gets a vector of a token that says which token it is, whatever the residual
stream has become. After attention and feed-forward, the stream is projected to that
width, goes through the activation, is multiplied with the vector, and the product is
projected back, normalised and added. The table is large, and a token reads one line of
it; in Gemma 3n it has no lines of tokens of images and sound, which get that of token 0.
The matrices are small: each rank has all of them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    norm_part,
    weight_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import linear, normalise
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

AFTER = "post_per_layer_input_norm"
TABLE = "model.embed_tokens_per_layer.weight"
PROJECTION = "model.per_layer_model_projection.weight"
PROJECTION_NORM = "model.per_layer_projection_norm"


@frozen
class LayerInput:
    """Sizes of what one layer does with its input, in elements."""

    hidden_size: int
    width: int
    norms: NormRule

    @property
    def gate(self) -> LinearSizes:
        """From the residual stream to the input's width."""
        return LinearSizes(
            ("per_layer_input_gate",), (self.width,), self.hidden_size, Shard.NONE
        )

    @property
    def out(self) -> LinearSizes:
        """Back to the residual stream."""
        return LinearSizes(
            ("per_layer_projection",), (self.hidden_size,), self.width, Shard.NONE
        )

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        return (self.gate, self.out)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.gate.elements + self.out.elements + self.hidden_size

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.hidden_size * self.norms.wide


@frozen(eq=False)
class LayerInputWeights:
    """The weights of what one layer does with its input."""

    gate: Linear
    out: Linear
    after: Norm


@frozen
class InputTable:
    """Sizes of what makes the inputs of all layers."""

    vocab_size: int
    hidden_size: int
    layers: int
    width: int
    norms: NormRule
    has_all_tokens: bool = True  # False: others get the line of token 0

    @property
    def line(self) -> int:
        """Elements of a token's inputs of all layers."""
        return self.layers * self.width

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return (self.vocab_size + self.hidden_size) * self.line + self.width


@frozen(eq=False)
class InputTableWeights:
    """The weights that make the inputs of all layers."""

    embed: "Tensor"  # [vocab, line]
    projection: Linear  # line outputs of hidden inputs
    norm: Norm  # [width]


def empty_layer_input(sizes: LayerInput, make: WeightMaker) -> LayerInputWeights:
    """Returns uninitialised weights of these sizes."""
    return LayerInputWeights(
        make.linear(sizes.gate),
        make.linear(sizes.out),
        make.norm(sizes.hidden_size, sizes.norms),
    )


def layer_input_parts(
    sizes: LayerInput, weights: LayerInputWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    yield from weight_parts(sizes.gate, weights.gate, form)
    yield from weight_parts(sizes.out, weights.out, form)
    yield norm_part(AFTER, weights.after, sizes.norms)


def empty_input_table(sizes: InputTable, make: WeightMaker) -> InputTableWeights:
    """Returns uninitialised weights of these sizes."""
    projection = make.matrix(sizes.line, sizes.hidden_size)
    return InputTableWeights(
        make.tensor(sizes.vocab_size, sizes.line),
        Linear(weight=projection, parts=(sizes.line,)),
        make.norm(sizes.width, sizes.norms),
    )


def input_table_parts(
    sizes: InputTable, weights: InputTableWeights
) -> Iterator[WeightPart]:
    """Yields the tensors of a checkpoint, with their targets."""
    yield WeightPart(TABLE, weights.embed)
    yield WeightPart(PROJECTION, weights.projection.weight)
    yield norm_part(PROJECTION_NORM, weights.norm, sizes.norms)


def make_layer_inputs(
    sizes: InputTable,
    weights: InputTableWeights,
    tokens: "Tensor",
    embedded: "Tensor",
    context: ProductContext,
) -> "Tensor":
    """Returns the inputs of all layers [tokens, layers, width] of tokens with these
    embeddings, scaled ones.
    """
    import torch
    import torch.nn.functional as F

    if not sizes.has_all_tokens:
        tokens = tokens.masked_fill(tokens >= sizes.vocab_size, 0)
    own = F.embedding(tokens, weights.embed)
    own.mul_(torch.tensor(sizes.width**0.5, dtype=own.dtype).item())
    projected = linear(embedded, weights.projection, context)
    projected.mul_(sizes.hidden_size**-0.5)
    inputs = normalise(projected.view(-1, sizes.width), weights.norm).view(own.shape)
    return inputs.add_(own).mul_(2**-0.5).view(-1, sizes.layers, sizes.width)


def layer_input_rows(
    weights: LayerInputWeights, hidden: "Tensor", inputs: "Tensor", step: ModelStep
) -> "Tensor":
    """Returns what a layer makes of its inputs [tokens, width] and of its residual
    stream, to be added to that: [tokens, hidden] each.
    """
    import torch.nn.functional as F

    gate = linear(hidden, weights.gate, step.products)
    product = F.gelu(gate, approximate="tanh").mul_(inputs)
    return normalise(linear(product, weights.out, step.products), weights.after)
