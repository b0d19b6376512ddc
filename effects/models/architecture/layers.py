"""A decoder layer as a value: an attention, a recurrent sublayer and a feed-forward, each
of one of the types, or absent.

Each type is a file of its own, with its sizes (read from a config, without torch), its
weights, made of leaves, and its step, a function over them, which adds to the residual
stream. This file lists the types: another one is one more member of a union, and one more
case of each function below, and of layer_step.py; recurrent.py lists those of recurrent
sublayers. layer_reader.py reads layers from a config.

Most layers have an attention or a recurrent sublayer, then a feed-forward. Some have only
one of the three (Nemotron-H); some have an attention beside a recurrent sublayer, which
read the same normalised rows (Falcon-H1).
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, fields, frozen, has

from minfer.effects.models.architecture.altup import (
    AltUp,
    AltUpWeights,
    altup_parts,
    empty_altup,
)
from minfer.effects.models.architecture.dense import (
    Dense,
    DenseWeights,
    dense_parts,
    empty_dense,
)
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.gqa_weights import (
    GQAWeights,
    empty_gqa,
    gqa_parts,
)
from minfer.effects.models.architecture.layer_inputs import (
    LayerInput,
    LayerInputWeights,
    empty_layer_input,
    layer_input_parts,
)
from minfer.effects.models.architecture.linear import (
    IN_FULL_NUMBERS,
    LinearSizes,
    WeightMaker,
    unquantized,
)
from minfer.effects.models.architecture.mla import (
    MLA,
    MLAWeights,
    empty_mla,
    mla_parts,
)
from minfer.effects.models.architecture.moe import MoE
from minfer.effects.models.architecture.moe_weights import (
    MoEWeights,
    empty_moe,
    moe_parts,
)
from minfer.effects.models.architecture.products import in_kernel_layout
from minfer.effects.models.architecture.quantization import PLAIN_FORM, CheckpointForm
from minfer.effects.models.architecture.recurrent import (
    Recurrent,
    RecurrentWeights,
    empty_recurrent,
    recurrent_parts,
)
from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import RankInfo
from minfer.kernels.leaves import ExpertRouter, LatentWeights, Linear, Norm

if TYPE_CHECKING:
    from torch import Tensor

Attention = GQA | MLA
SCALAR: Final = "layer_scalar"  # in a layer of a checkpoint

FeedForward = Dense | MoE
Sublayer = Attention | Recurrent | FeedForward
AttentionWeights = GQAWeights | MLAWeights
FeedForwardWeights = DenseWeights | MoEWeights


@frozen
class Layer:
    """Sizes of one decoder layer."""

    attention: Attention | None
    feed_forward: FeedForward | None
    # Both read the same residual stream, and their results are added to it together
    # (Wang and Komatsuzaki 2021). Without a norm of its own, the feed-forward reads what
    # attention reads.
    parallel: bool = False
    inputs: LayerInput | None = None  # what it does with an input of its own
    scalar: bool = False  # the residual stream is multiplied with a number at its end
    altup: AltUp | None = None  # there are several residual streams
    # Beside an attention, it reads the rows that attention reads, normalised by its norm.
    recurrent: Recurrent | None = None

    def for_rank(self, rank_info: RankInfo) -> "Layer":
        """Returns the sizes of one rank's part. Raises `UnsupportedModelError`."""
        attention, recurrent, feed = self.attention, self.recurrent, self.feed_forward
        return evolve(
            self,
            attention=None if attention is None else attention.for_rank(rank_info),
            recurrent=None if recurrent is None else recurrent.for_rank(rank_info),
            feed_forward=None if feed is None else feed.for_rank(rank_info),
        )

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        """Those that it has, in their order."""
        every = self.attention, self.recurrent, self.feed_forward
        return tuple(sublayer for sublayer in every if sublayer is not None)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """What it keeps of a sequence, whatever its length."""
        return () if self.recurrent is None else self.recurrent.state_parts

    @property
    def shares_keys_of(self) -> int | None:
        """The layer before it whose keys and values it reads instead of its own."""
        return None if self.attention is None else self.attention.shares_keys_of

    def with_long_factors(self, *, is_long: bool) -> "Layer":
        """Returns the layer with the long factors of longrope, or the short ones."""
        attention = self.attention
        if attention is None or attention.rope is None:
            return self
        if attention.rope.kind != "longrope":
            return self
        rope = evolve(attention.rope, is_long=is_long)
        return evolve(self, attention=evolve(attention, rope=rope))

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices."""
        of_sublayers = (sublayer.matrices for sublayer in self.sublayers)
        beside = () if self.inputs is None else self.inputs.matrices
        streams = () if self.altup is None else self.altup.matrices
        return (*chain.from_iterable(of_sublayers), *beside, *streams)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        others = self.scalar + (0 if self.inputs is None else self.inputs.parameters)
        others += 0 if self.altup is None else self.altup.parameters
        return sum(sublayer.parameters for sublayer in self.sublayers) + others

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        parts = (*self.sublayers, self.inputs, self.altup)
        return sum(part.float32_elements for part in parts if part is not None)

    @property
    def active_parameters(self) -> int:
        """Elements that a token is multiplied with."""
        mixers = (self.attention, self.recurrent)
        mixed = sum(mixer.parameters for mixer in mixers if mixer is not None)
        feed = self.feed_forward
        return mixed + (0 if feed is None else feed.active_parameters)


@frozen(eq=False)
class LayerWeights:
    """The weights of one decoder layer."""

    attention: AttentionWeights | None
    feed_forward: FeedForwardWeights | None
    inputs: LayerInputWeights | None = None
    scalar: "Tensor | None" = None  # [1]
    altup: AltUpWeights | None = None
    recurrent: RecurrentWeights | None = None


@frozen
class LayerGroup:
    """Layers with the same attention, window included: what they keep of a token has one
    shape, and they keep it of the same tokens, so one block table can serve them.
    """

    attention: Attention
    members: tuple[int, ...]  # indices of the layers


def layer_groups(layers: tuple[Layer, ...]) -> tuple[LayerGroup, ...]:
    """Returns the layers with an attention by their cache needs, in the order of their
    first members.
    """
    members: dict[Attention, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.attention is not None:
            members.setdefault(layer.attention, []).append(index)
    return tuple(
        LayerGroup(attention, tuple(indices)) for attention, indices in members.items()
    )


def empty_layer(layer: Layer, make: WeightMaker) -> LayerWeights:
    """Returns uninitialised weights of a layer."""
    attention: AttentionWeights | None = None
    feed_forward: FeedForwardWeights | None = None
    match layer.attention:
        case GQA() as gqa:
            attention = empty_gqa(gqa, make)
        case MLA() as mla:
            attention = empty_mla(mla, make)
    match layer.feed_forward:
        case Dense() as dense:
            feed_forward = empty_dense(dense, make)
        case MoE() as moe:
            feed_forward = empty_moe(moe, make)
    recurrent, inputs = layer.recurrent, layer.inputs
    return LayerWeights(
        attention,
        feed_forward,
        None if inputs is None else empty_layer_input(inputs, make),
        make.vector(1) if layer.scalar else None,
        None if layer.altup is None else empty_altup(layer.altup, make),
        None if recurrent is None else empty_recurrent(recurrent, make),
    )


def layer_parts(
    layer: Layer, weights: LayerWeights, form: CheckpointForm = PLAIN_FORM
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""
    match layer.attention, weights.attention:
        case GQA() as gqa, GQAWeights() as gqa_weights:
            yield from gqa_parts(gqa, gqa_weights, form)
        case MLA() as mla, MLAWeights() as mla_weights:
            yield from mla_parts(mla, mla_weights, form)
    if layer.recurrent is not None and weights.recurrent is not None:
        yield from recurrent_parts(layer.recurrent, weights.recurrent, form)
    match layer.feed_forward, weights.feed_forward:
        case Dense() as dense, DenseWeights() as dense_weights:
            yield from dense_parts(dense, dense_weights, form)
        case MoE() as moe, MoEWeights() as moe_weights:
            yield from moe_parts(moe, moe_weights, form)
    if layer.inputs is not None and weights.inputs is not None:
        yield from layer_input_parts(layer.inputs, weights.inputs, form)
    if weights.scalar is not None:
        yield WeightPart(SCALAR, weights.scalar)
    if layer.altup is not None and weights.altup is not None:
        yield from altup_parts(layer.altup, weights.altup, form)


def finish_layer(weights: LayerWeights, dtype: str) -> LayerWeights:
    """Returns a layer, whose tensors are filled, in the form that kernels multiply with:
    MLA's expansion of latents in full numbers, `dtype`, as queries are multiplied with
    parts of it, small matrices of AltUp and of recurrent sublayers, too, and quantized
    matrices as their kernels store them.
    """
    layer_weights: LayerWeights = _finished(weights, dtype)
    return layer_weights


def _finished(node: Any, dtype: str, *, plain: bool = False) -> Any:
    """Returns a part of a layer's weights, finished; `plain`: in full numbers."""
    if isinstance(node, Linear):
        return in_kernel_layout(unquantized(node, dtype) if plain else node)
    if not has(type(node)) or isinstance(node, Norm | ExpertRouter):
        return node
    plain = plain or isinstance(node, LatentWeights | AltUpWeights)
    finished = {
        attribute.name: _finished(
            getattr(node, attribute.name),
            dtype,
            plain=plain or IN_FULL_NUMBERS in attribute.metadata,
        )
        for attribute in fields(type(node))
    }
    return evolve(node, **finished)
