"""Which part of each tensor of a checkpoint a rank reads.

Theory. How a tensor is divided need not be said again for each format: the tensors of the
whole model and those of a rank's sizes have the same names, and shapes that differ in one
dimension at most. Its size there, divided by the rank's, is the number of slices, and
ranks have successive ones; where there are fewer slices than ranks (key heads), several
ranks have the same. Only the vocabulary may be divided unevenly: the last rows of
embedding and head are zeros then.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from minfer.effects.models.architecture.spec import (
    EMBED,
    HEAD_BIAS,
    LM_HEAD,
    ModelSpec,
)
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.parts import WeightPart
from minfer.effects.models.ranks import WHOLE_MODEL

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS: Final = 1  # the dimension of them in matrices of all experts


@frozen
class Cut:
    """Which part of a stored tensor is read: in one dimension a range, or, of matrices
    that are stored as one, a range of each.
    """

    dim: int
    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """The size of the part in that dimension."""
        return sum(map(len, self.ranges))

    def shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part."""
        return (*full_shape[: self.dim], self.size, *full_shape[self.dim + 1 :])

    def apply(self, stored: Any) -> "Tensor":
        """Returns the part of a tensor, or of one in an open file, of which no more is
        read.
        """
        import torch

        before = (slice(None),) * self.dim
        slices: list[Tensor] = [
            stored[(*before, slice(indexes.start, indexes.stop))]
            for indexes in self.ranges
        ]
        return slices[0] if len(slices) == 1 else torch.cat(slices, self.dim)


@frozen(eq=False)
class RankPart:
    """A tensor of a checkpoint, as one rank reads it."""

    part: WeightPart
    cut: Cut | None = None  # None: all of it
    # Biases of sums over ranks are added by one rank: they are zero here.
    is_zero: bool = False

    def fill(self, stored: "Tensor") -> None:
        """Copy the tensor that was read to its target."""
        if self.is_zero:
            self.part.target.zero_()
            return
        if self.cut is not None:
            stored = padded(stored, self.part.shape, self.cut.dim)
        self.part.fill(stored)


def rank_parts(
    spec: ModelSpec,
    weight_parts: Iterator[WeightPart],
    model_parts: Mapping[str, WeightPart],
) -> Iterator[RankPart]:
    """Yields the parts of a rank, whose sizes `spec` has; `model_parts` are those of the
    model by name. Raises `UnsupportedModelError` for a tensor that cannot be divided so.
    """
    for weight_part in weight_parts:
        if spec.rank_info == WHOLE_MODEL:
            yield RankPart(weight_part)
            continue
        model_part = model_parts[weight_part.name]
        if weight_part.undivided:
            yield RankPart(evolve(model_part, target=weight_part.target))
            continue
        cut = _cut(spec, weight_part, model_part)
        yield RankPart(
            weight_part,
            cut,
            is_zero=weight_part.on_one_rank and spec.rank_info.tensor_rank > 0,
        )


def padded(stored: "Tensor", shape: tuple[int, ...], dim: int) -> "Tensor":
    """Returns a tensor with zeros behind it in a dimension, up to this shape."""
    import torch

    missing = shape[dim] - stored.shape[dim]
    if not missing:
        return stored
    zeros = stored.new_zeros((*shape[:dim], missing, *shape[dim + 1 :]))
    return torch.cat((stored, zeros), dim)


def _cut(spec: ModelSpec, weight_part: WeightPart, model_part: WeightPart) -> Cut | None:
    """Returns the part of a tensor, the whole model's being `model_part`, that a rank
    reads.
    """
    full_shape = model_part.shape
    by_vocabulary = weight_part.name in (EMBED, LM_HEAD, HEAD_BIAS)
    if by_vocabulary and spec.rank_info.parallel.tensor > 1:
        rows = spec.vocab_rows
        first = min(rows.start, spec.vocab_size)
        return Cut(0, (range(first, min(rows.stop, spec.vocab_size)),))
    shape = weight_part.shape
    if shape == full_shape:
        return None
    differing = [dim for dim, size in enumerate(full_shape) if shape[dim] != size]
    dim, ranks = differing[0], spec.rank_info.parallel.tensor
    pieces = _pieces(weight_part, model_part, dim)
    if (
        len(shape) != len(full_shape)
        or len(differing) > 1
        or any(not part or whole % part for whole, part in pieces)
        or sum(part for _, part in pieces) != shape[dim]
    ):
        raise UnsupportedModelError(
            f"tensor {weight_part.name} of shape {list(full_shape)} cannot be divided "
            f"into parts of shape {list(shape)} for {ranks} ranks; use fewer "
            f"(tensor_parallel_size)"
        )
    ranges, first = [], 0
    for whole, part in pieces:
        slices = whole // part
        start = first + spec.rank_info.tensor_rank * slices // ranks * part
        ranges.append(range(start, start + part))
        first += whole
    return Cut(dim, tuple(ranges))


def _pieces(
    weight_part: WeightPart, model_part: WeightPart, dim: int
) -> list[tuple[int, int]]:
    """Returns the sizes of each matrix that is stored in a tensor, in the dimension in
    which ranks divide it: of the whole model, and of a rank.

    Where numbers are packed, or have a scale for several outputs, these are sizes of
    packed words, or of scales.
    """
    whole, part = model_part.shape[dim], weight_part.shape[dim]
    if weight_part.pieces:
        outputs = sum(model_part.pieces)
        return [
            (whole_outputs * whole // outputs, rank_outputs * whole // outputs)
            for whole_outputs, rank_outputs in zip(
                model_part.pieces, weight_part.pieces, strict=True
            )
        ]
    count = weight_part.fused if dim == OUTPUTS else 1
    return [(whole // count, part // count)] * count
