"""Weights as a frozen tree: norms and embeddings are tensors, matrices `Linear` leaves.

Also random weights, from a spec alone.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layers import (
    LayerWeights,
    empty_layer,
    finish_layer,
    layer_parts,
)
from minfer.effects.models.linear import Maker, matrix_parts, norm_part
from minfer.effects.models.parts import Part
from minfer.effects.models.quantization import PLAIN_FILES, Files
from minfer.effects.models.rank_parts import RankPart, rank_parts
from minfer.effects.models.ranks import WHOLE, Place
from minfer.effects.models.spec import EMBED, LM_HEAD, ModelSpec, layer_prefix
from minfer.kernels.leaves import Linear, Norm

if TYPE_CHECKING:
    import torch

# Random values shared by all tensors: separate ones for each would take ten seconds.
POOL: Final = 2_000_003


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


def random_weights(
    spec: ModelSpec,
    dtype: str,
    seed: int = 0,
    device: str = "cpu",
    place: Place = WHOLE,
) -> Weights:
    """Returns weights drawn from N(0, initializer_range), norms 1; the same on every
    device. A rank's are its parts of the whole model's.
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL).normal_(0.0, spec.initializer_range, generator=draw)
    pool = pool.to(device=device, dtype=torch_dtype(dtype))
    how = spec.quantization
    files = PLAIN_FILES if how is None else Files(OnLoad(how.format.scheme))
    whole = expected_parts(spec, files)
    own = spec if place == WHOLE else spec.for_rank(place)
    weights = empty_weights(own, dtype, device)
    parts = rank_parts(own, checkpoint_parts(own, weights, files), whole)
    mine = {one.part.name: one for one in parts}
    at = 0
    for name, part in whole.items():
        one = mine.get(name)
        if name.endswith("norm.weight"):
            if one is not None:
                one.part.place.fill_(1.0)
            continue
        drawn = _room(one, part, pool)
        at = _draw(pool, at, part.shape, drawn)
        if one is not None and drawn is not None and drawn is not one.part.place:
            one.fill(
                drawn if one.cut is None else one.cut.of(drawn, part.shape[one.cut.dim])
            )
    layers = (finish_layer(layer, dtype) for layer in weights.layers)
    return evolve(weights, layers=tuple(layers))


def _room(
    one: RankPart | None, whole: Part, pool: "torch.Tensor"
) -> "torch.Tensor | None":
    """Returns where a tensor is drawn, whole: its place, or memory of its own if that
    takes a part of it, or takes it in another form; None if it is not needed.
    """
    import torch

    if one is None:
        return None
    if one.cut is None and one.part.take is None and not one.is_zero:
        return one.part.place
    return torch.empty(whole.shape, dtype=pool.dtype, device=pool.device)


def _draw(
    pool: "torch.Tensor", at: int, shape: tuple[int, ...], drawn: "torch.Tensor | None"
) -> int:
    """Draw a tensor of this shape from the pool's numbers behind `at`; returns where the
    next one begins. None: it is only passed over.
    """
    columns = shape[-1]
    lines = prod(shape) // columns
    some = max(1, POOL // 8 // columns)
    matrix = (
        None if drawn is None else drawn.flatten(0, -2) if len(shape) > 1 else drawn[None]
    )
    for first in range(0, lines, some):
        size = min(some, lines - first) * columns
        if matrix is not None:
            rows = matrix[first : first + some]
            rows.copy_(pool[at : at + size].view(rows.shape))
        # Reads begin anywhere in the first half, so that rows are seldom equal.
        at = (at + size + 1) % (POOL // 2)
    return at
