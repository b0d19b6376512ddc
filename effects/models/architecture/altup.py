"""Several residual streams, of which a layer computes one (AltUp, Baykal et al. 2023):
sizes, weights, steps.

Theory. A wider residual stream holds more of a token, but the work of a layer grows with
the square of its width. With AltUp a token has several streams of one width, and a layer
computes one of them, the *active* one:

1. It predicts all streams: to each it adds a mix of all, whose coefficients depend on the
   token. They are a product with as many numbers as there are streams, which are tanh of
   a product with the normalised active stream.
2. Attention and feed-forward run on the prediction of the active stream.
3. It corrects all streams: to each it adds the difference of the result and that
   prediction, times a coefficient of the token, which comes from the result in the same
   way, and is near 1.

Before the first layer, the other streams are projections of the embedding, made as long
as it is. Behind the last one they are projected again, made as long as the first stream,
and the mean of all goes on. What a layer makes of its own input (layer_inputs.py) is read
from the corrected active stream, and added to all streams but the first.

The layers' matrices are small, and dequantized if a checkpoint has them quantized; each
rank has all of them.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.laurel import (
    Laurel,
    LaurelWeights,
    empty_laurel,
    laurel_parts,
)
from minfer.effects.models.architecture.linear import (
    LinearSizes,
    NormRule,
    WeightMaker,
    norm_part,
    weight_parts,
)
from minfer.effects.models.architecture.product_context import ProductContext
from minfer.effects.models.architecture.products import linear, normalise
from minfer.effects.models.architecture.quantization import CheckpointForm
from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Norm, Shard

if TYPE_CHECKING:
    from torch import Tensor

ENTER: Final = "model.altup_projections"
LEAVE: Final = "model.altup_unembed_projections"
ROUTER_NORM: Final = "altup.router_norm"
SCALE: Final = "altup.correct_output_scale"
MIN_MEAN_SQUARE: Final = 1e-5  # of a projected stream, whose length is changed


@frozen(kw_only=True)
class AltUp:
    """Sizes of one layer's streams, in elements."""

    hidden_size: int
    streams: int
    active: int  # the stream that the layer computes
    scaled: bool  # factors multiply what its input of a token is combined with
    laurel: Laurel  # beside its attention
    norms: NormRule

    @property
    def router(self) -> LinearSizes:
        """From a stream to a number for each stream."""
        return self._matrix("altup.modality_router", self.streams, self.hidden_size)

    @property
    def prediction(self) -> LinearSizes:
        """From these numbers to the coefficients of each stream in each prediction."""
        return self._matrix("altup.prediction_coefs", self.streams**2, self.streams)

    @property
    def correction(self) -> LinearSizes:
        """From these numbers to a coefficient of each correction."""
        return self._matrix("altup.correction_coefs", self.streams, self.streams)

    def _matrix(self, name: str, outputs: int, inputs: int) -> LinearSizes:
        return LinearSizes((name,), (outputs,), inputs, Shard.NONE, plain=True)

    @property
    def matrices(self) -> tuple[LinearSizes, ...]:
        """The sizes of all matrices of a layer."""
        own = (self.router, self.prediction, self.correction)
        return own + self.laurel.matrices

    @property
    def parameters(self) -> int:
        """Elements of all weights of a layer."""
        own = self.router.elements + self.prediction.elements + self.correction.elements
        return own + 2 * self.hidden_size + self.laurel.parameters

    @property
    def float32_elements(self) -> int:
        """Elements of weights that are in float32 whatever the activations' dtype."""
        return self.hidden_size + self.laurel.float32_elements

    @property
    def projection_parameters(self) -> int:
        """Elements of the projections before the first layer and behind the last one."""
        return 2 * (self.streams - 1) * self.hidden_size**2


@frozen(eq=False, kw_only=True)
class AltUpWeights:
    """The weights of one layer's streams."""

    active: int  # the stream that the layer computes
    scaled: bool  # as in `AltUp`
    router_norm: Norm  # [hidden] float32: a checkpoint's factors divided by hidden
    router: Linear
    prediction: Linear
    correction: Linear
    scale: "Tensor"  # [hidden]
    laurel: LaurelWeights


@frozen(eq=False)
class StreamProjections:
    """The weights that make several streams of one, and one of several."""

    enter: Linear  # (streams - 1) * hidden outputs of hidden inputs
    leave: "Tensor"  # [streams - 1, hidden, hidden]


def read_altup(reader: ConfigReader, norms: NormRule) -> AltUp:
    """Returns the streams of each layer, from a config. Raises `ModelConfigError`."""
    hidden, streams = (
        reader.size("hidden_size"),
        reader.size("altup_num_inputs", low=2),
    )
    active = reader.size("altup_active_idx", low=0)
    if active >= streams:
        raise reader.error("altup_active_idx", f"below altup_num_inputs = {streams}")
    return AltUp(
        hidden_size=hidden,
        streams=streams,
        active=active,
        scaled=reader.flag("altup_correct_scale"),
        laurel=Laurel(hidden, reader.size("laurel_rank"), norms),
        norms=norms,
    )


def empty_altup(sizes: AltUp, make: WeightMaker) -> AltUpWeights:
    """Returns uninitialised weights of a layer."""
    return AltUpWeights(
        active=sizes.active,
        scaled=sizes.scaled,
        router_norm=Norm(make.vector(sizes.hidden_size, "float32"), sizes.norms.eps),
        router=make.linear(sizes.router),
        prediction=make.linear(sizes.prediction),
        correction=make.linear(sizes.correction),
        scale=make.vector(sizes.hidden_size),
        laurel=empty_laurel(sizes.laurel, make),
    )


def altup_parts(
    sizes: AltUp, weights: AltUpWeights, form: CheckpointForm
) -> Iterator[WeightPart]:
    """Yields the tensors of a layer of a checkpoint, with their targets."""

    def divided(stored: "Tensor") -> "Tensor":
        return stored.float() / sizes.hidden_size

    router_norm = norm_part(ROUTER_NORM, weights.router_norm, sizes.norms)
    yield evolve(router_norm, arrange=divided)
    yield from weight_parts(sizes.router, weights.router, form)
    yield from weight_parts(sizes.prediction, weights.prediction, form)
    yield from weight_parts(sizes.correction, weights.correction, form)
    yield WeightPart(SCALE, weights.scale)
    yield from laurel_parts(sizes.laurel, weights.laurel, form)


def empty_projections(sizes: AltUp, make: WeightMaker) -> StreamProjections:
    """Returns the uninitialised projections of a model."""
    others, hidden = sizes.streams - 1, sizes.hidden_size
    enter = make.matrix(others * hidden, hidden)
    return StreamProjections(
        Linear(weight=enter, parts=(hidden,) * others),
        make.tensor(others, hidden, hidden),
    )


def projection_parts(weights: StreamProjections) -> Iterator[WeightPart]:
    """Yields the tensors of a checkpoint, with their targets."""
    for index, matrix in enumerate(weights.enter.pieces()):
        yield WeightPart(f"{ENTER}.{index}.weight", matrix.weight)
    for index, target in enumerate(weights.leave):
        yield WeightPart(f"{LEAVE}.{index}.weight", target)


def enter_streams(
    weights: StreamProjections, hidden: "Tensor", products: ProductContext
) -> "Tensor":
    """Returns the streams [tokens, streams, hidden] of scaled embeddings [tokens,
    hidden].
    """
    import torch

    first = hidden[:, None]
    others = linear(hidden, weights.enter, products).view(
        len(hidden), -1, hidden.shape[1]
    )
    return torch.cat((first, _as_long(others, first)), 1)


def leave_streams(weights: StreamProjections, streams: "Tensor") -> "Tensor":
    """Returns one residual stream [tokens, hidden] of several, [tokens, streams,
    hidden].
    """
    import torch

    first, others = streams[:, 0], streams[:, 1:].transpose(0, 1)
    projected = _as_long(torch.bmm(others, weights.leave.mT), first)
    return torch.cat((first[None], projected)).mean(0)


def _as_long(vectors: "Tensor", like: "Tensor") -> "Tensor":
    """Returns vectors [..., hidden], changed in place, with the lengths of others."""
    import torch

    lengths, wanted = (
        torch.linalg.vector_norm(rows, 2, -1, keepdim=True, dtype=torch.float32)
        for rows in (vectors, like)
    )
    shortest = (MIN_MEAN_SQUARE * vectors.shape[-1]) ** 0.5
    return vectors.mul_(wanted / lengths.clamp_(min=shortest))


def predict_streams(
    weights: AltUpWeights, streams: "Tensor", products: ProductContext
) -> "Tensor":
    """Returns the predictions of a layer's streams: [tokens, streams, hidden] each."""
    import torch

    numbers = _route(weights, streams[:, weights.active].contiguous(), products)
    mixes = linear(numbers, weights.prediction, products)
    count = streams.shape[1]
    return torch.baddbmm(streams, mixes.view(-1, count, count), streams)


def correct_streams(
    weights: AltUpWeights,
    predictions: "Tensor",
    hidden: "Tensor",
    products: ProductContext,
) -> None:
    """Correct predicted streams [tokens, streams, hidden] in place by what the layer made
    of the active one, [tokens, hidden].
    """
    numbers = _route(weights, hidden, products)
    coefficients = linear(numbers, weights.correction, products).add_(1)
    change = hidden - predictions[:, weights.active]
    predictions.addcmul_(change[:, None], coefficients[:, :, None])


def scaled_active(weights: AltUpWeights, streams: "Tensor") -> "Tensor":
    """Returns what a layer combines with its input of a token: [tokens, hidden]."""
    active = streams[:, weights.active]
    return active * weights.scale if weights.scaled else active.contiguous()


def _route(weights: AltUpWeights, hidden: "Tensor", products: ProductContext) -> "Tensor":
    """Returns a number from -1 to 1 for each stream, [tokens, streams], by one of them,
    [tokens, hidden].
    """
    normalised = normalise(hidden, weights.router_norm)
    return linear(normalised, weights.router, products).tanh_()
