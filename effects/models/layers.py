"""A decoder layer as a value: an attention and a feed-forward, each of one of the types.

Each type is a file of its own, with its sizes (read from a config, without torch), its
weights, made of `Linear` leaves, and its step, a function over them. This file lists the
types: another one is one more member of a union, and one more case of each function
below.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.cache import PagedCache
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.dense import (
    Dense,
    DenseWeights,
    dense_parts,
    empty_dense,
    feed_dense,
    read_dense,
)
from minfer.effects.models.families import Family
from minfer.effects.models.gqa import (
    GQA,
    GQAWeights,
    empty_gqa,
    gqa_parts,
    mix_gqa,
    read_gqa,
)
from minfer.effects.models.linear import Maker
from minfer.effects.models.products import Ranks

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.effects.models.batch import Batch

Attention = GQA
FeedForward = Dense
AttentionWeights = GQAWeights
FeedForwardWeights = DenseWeights


@frozen
class Layer:
    """Sizes of one decoder layer."""

    attention: Attention
    feed_forward: FeedForward

    @property
    def matrix_elements(self) -> int:
        """Elements of all matrices."""
        return self.attention.matrix_elements + self.feed_forward.matrix_elements

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.attention.parameters + self.feed_forward.parameters


@frozen(eq=False)
class LayerWeights:
    """The weights of one decoder layer."""

    attention: AttentionWeights
    feed_forward: FeedForwardWeights


@frozen
class LayerGroup:
    """Layers with the same attention, window included: what they keep of a token has one
    shape, and they keep it of the same tokens, so one block table can serve them.
    """

    attention: Attention
    members: tuple[int, ...]  # indices of the layers

    @property
    def kv_elements(self) -> int:
        """A token's elements in the caches of these layers."""
        return len(self.members) * self.attention.kv_elements


def layer_groups(layers: tuple[Layer, ...]) -> tuple[LayerGroup, ...]:
    """Returns the layers by their cache needs, in the order of their first members."""
    members: dict[Attention, list[int]] = {}
    for index, layer in enumerate(layers):
        members.setdefault(layer.attention, []).append(index)
    return tuple(LayerGroup(kind, tuple(found)) for kind, found in members.items())


def read_layers(read: ConfigReader, family: Family) -> tuple[Layer, ...]:
    """Returns the layers that a config describes. Raises `ModelConfigError` and
    `UnsupportedModelError`.
    """
    match family.attention:
        case "gqa":
            attentions = read_gqa(read, family)
    match family.feed_forward:
        case "dense":
            feed_forward = read_dense(read, family)
    return tuple(Layer(attention, feed_forward) for attention in attentions)


def empty_layer(layer: Layer, make: Maker) -> LayerWeights:
    """Returns uninitialised weights of a layer."""
    match layer.attention:
        case GQA() as gqa:
            attention = empty_gqa(gqa, make)
    match layer.feed_forward:
        case Dense() as dense:
            feed_forward = empty_dense(dense, make)
    return LayerWeights(attention, feed_forward)


def layer_parts(layer: Layer, weights: LayerWeights) -> "Iterator[tuple[str, Tensor]]":
    """Yields each tensor's name in a layer of a checkpoint, and its place: a view."""
    match layer.attention, weights.attention:
        case GQA() as gqa, GQAWeights() as attention:
            yield from gqa_parts(gqa, attention)
    match layer.feed_forward, weights.feed_forward:
        case Dense() as dense, DenseWeights() as feed_forward:
            yield from dense_parts(dense, feed_forward)


def mix(
    weights: AttentionWeights,
    hidden: "Tensor",
    eps: float,
    index: int,
    batch: "Batch",
    cache: PagedCache,
) -> "Tensor":
    """Returns the results of attention, before the product `out`: [tokens, out's
    inputs].
    """
    match weights:
        case GQAWeights():
            return mix_gqa(weights, hidden, eps, index, batch, cache)


def feed(
    weights: FeedForwardWeights,
    hidden: "Tensor",
    eps: float,
    ranks: Ranks,
    *,
    fused: bool,
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it."""
    match weights:
        case DenseWeights():
            feed_dense(weights, hidden, eps, ranks, fused=fused)
