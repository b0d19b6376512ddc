"""A decoder layer as a value: an attention, a recurrent sublayer and a feed-forward, each
of one of the types, or absent.

Each type is a file of its own, with its sizes (read from a config, without torch), its
weights, made of leaves, and its step, a function over them, which adds to the residual
stream. This file lists the types: another one is one more member of a union, and one more
case of each function below; recurrent.py lists those of recurrent sublayers.
layer_reader.py reads layers from a config.

Most layers have an attention or a recurrent sublayer, then a feed-forward. Some have only
one of the three (Nemotron-H); some have an attention beside a recurrent sublayer, which
read the same normalised rows (Falcon-H1).
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, fields, frozen, has

from minfer.effects.models.architecture.dense import (
    Dense,
    DenseWeights,
    dense_parts,
    empty_dense,
    feed_dense,
)
from minfer.effects.models.architecture.gqa import GQA
from minfer.effects.models.architecture.gqa_step import attend_gqa
from minfer.effects.models.architecture.gqa_weights import (
    GQAWeights,
    empty_gqa,
    gqa_parts,
)
from minfer.effects.models.architecture.layer_inputs import (
    LayerInput,
    LayerInputWeights,
    add_layer_input,
    empty_layer_input,
    layer_input_parts,
)
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    WeightMaker,
    unquantized,
)
from minfer.effects.models.architecture.mla import (
    MLA,
    MLAWeights,
    attend_mla,
    empty_mla,
    mla_parts,
)
from minfer.effects.models.architecture.model_step import ModelStep
from minfer.effects.models.architecture.moe import (
    MoE,
    MoEWeights,
    empty_moe,
    feed_moe,
    moe_parts,
)
from minfer.effects.models.architecture.products import (
    add_product,
    in_kernel_layout,
    normalise,
)
from minfer.effects.models.architecture.quantization import PLAIN_FORM, CheckpointForm
from minfer.effects.models.architecture.recurrent import (
    Recurrent,
    RecurrentWeights,
    empty_recurrent,
    mix_with_state,
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
        inputs = () if self.inputs is None else self.inputs.matrices
        of_sublayers = (sublayer.matrices for sublayer in self.sublayers)
        return (*chain.from_iterable(of_sublayers), *inputs)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        others = self.scalar + (0 if self.inputs is None else self.inputs.parameters)
        return sum(sublayer.parameters for sublayer in self.sublayers) + others

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        inputs = 0 if self.inputs is None else self.inputs.float32_elements
        return inputs + sum(sublayer.float32_elements for sublayer in self.sublayers)

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


def finish_layer(weights: LayerWeights, dtype: str) -> LayerWeights:
    """Returns a layer, whose tensors are filled, in the form that kernels multiply with:
    MLA's expansion of latents in full numbers, `dtype`, as queries are multiplied with
    parts of it, and quantized matrices as their kernels store them.
    """
    layer_weights: LayerWeights = _finished(weights, dtype)
    return layer_weights


def _finished(node: Any, dtype: str) -> Any:
    """Returns a part of a layer's weights, finished."""
    if isinstance(node, Linear):
        return in_kernel_layout(node)
    if not has(type(node)) or isinstance(node, Norm | ExpertRouter):
        return node
    if isinstance(node, LatentWeights):
        return evolve(node, expansion=unquantized(node.expansion, dtype))
    inner = {
        attribute.name: getattr(node, attribute.name) for attribute in fields(type(node))
    }
    return evolve(node, **{key: _finished(value, dtype) for key, value in inner.items()})


@frozen(eq=False)
class BranchInputs:
    """Normalised rows [tokens, hidden] that sublayers read which read the same stream.
    None: each reads the residual stream as it is then, and normalises it.
    """

    attention: "Tensor | None" = None  # and what is recurrent beside it
    feed_forward: "Tensor | None" = None

    def select(self, keep: "Tensor") -> "BranchInputs":
        """Returns the inputs of the feed-forward for some tokens."""
        if self.feed_forward is None:
            return self
        return BranchInputs(None, self.feed_forward.index_select(0, keep))


SEQUENTIAL: Final = BranchInputs()


def branch_inputs(layer: Layer, weights: LayerWeights, hidden: "Tensor") -> BranchInputs:
    """Returns what the sublayers of a layer read, if they read the same stream."""
    attention, feed_forward = weights.attention, weights.feed_forward
    if attention is None or attention.norm is None:
        return SEQUENTIAL
    if layer.parallel and feed_forward is not None:
        x, own = normalise(hidden, attention.norm), feed_forward.norm
        return BranchInputs(x, x if own is None else normalise(hidden, own))
    if layer.recurrent is not None:
        return BranchInputs(normalise(hidden, attention.norm))
    return SEQUENTIAL


def mix_tokens(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    index: int,
    step: ModelStep,
    keep: "Tensor | None" = None,
    x: "Tensor | None" = None,
) -> "Tensor":
    """Returns the residual stream [tokens, hidden] with the attention and the recurrent
    sublayer of layer `index` added, those that it has: of the tokens `keep` alone, or of
    all. `x`: as in `BranchInputs`.
    """
    sizes, recurrent, mixed = layer.recurrent, weights.recurrent, None
    if sizes is not None and recurrent is not None:
        rows, norm = (hidden, recurrent.norm) if x is None else (x, None)
        mixed = mix_with_state(sizes, recurrent, rows, norm, index, step)
    match weights.attention:
        case GQAWeights() as gqa_weights:
            hidden = attend_gqa(gqa_weights, hidden, index, step, keep, x)
        case MLAWeights() as mla_weights:
            hidden = attend_mla(mla_weights, hidden, index, step, keep, x)
        case None if keep is not None:
            hidden = hidden.index_select(0, keep)
    if mixed is not None and recurrent is not None:
        if keep is not None:
            mixed = mixed.index_select(0, keep)
        add_product(hidden, mixed, recurrent.out, step.products, step.communicator)
    return hidden


def feed(
    layer: Layer,
    weights: LayerWeights,
    hidden: "Tensor",
    step: ModelStep,
    x: "Tensor | None" = None,
) -> None:
    """Add the feed-forward of `hidden` [tokens, hidden] to it; `x`: as in
    `BranchInputs`.
    """
    match layer.feed_forward, weights.feed_forward:
        case Dense() as dense, DenseWeights() as dense_weights:
            feed_dense(dense, dense_weights, hidden, step, x)
        case MoE() as moe, MoEWeights() as moe_weights:
            feed_moe(moe, moe_weights, hidden, step, x)


def finish(weights: LayerWeights, hidden: "Tensor", index: int, step: ModelStep) -> None:
    """Change the residual stream as a layer does behind its feed-forward."""
    if weights.inputs is not None and step.layer_inputs is not None:
        add_layer_input(weights.inputs, hidden, step.layer_inputs[:, index], step)
    if weights.scalar is not None:
        hidden.mul_(weights.scalar)
