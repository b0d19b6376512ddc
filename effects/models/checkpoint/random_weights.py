"""Random weights of a model, from its spec alone."""

from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve

from minfer.effects.models.architecture.layers import finish_layer
from minfer.effects.models.architecture.quantization import PLAIN_FILES, Files
from minfer.effects.models.architecture.spec import ModelSpec
from minfer.effects.models.architecture.weights import (
    Weights,
    checkpoint_parts,
    empty_weights,
    expected_parts,
)
from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.formats.on_load import OnLoad
from minfer.effects.models.layout.rank_parts import RankPart, rank_parts
from minfer.effects.models.parts import Part
from minfer.effects.models.ranks import WHOLE, Place

if TYPE_CHECKING:
    import torch

# Random values shared by all tensors: separate ones for each would take ten seconds.
POOL: Final = 2_000_003


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
