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

from minfer.effects.models.architecture.spec import EMBED, LM_HEAD, ModelSpec
from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.parts import Part
from minfer.effects.models.ranks import WHOLE

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS: Final = 1  # the dimension of them in matrices of all experts


@frozen
class Cut:
    """Which part of a stored tensor is read: in one dimension a range of each of its
    equal pieces, one of which is all of it unless matrices are stored as one.
    """

    dim: int
    start: int
    stop: int
    pieces: int = 1

    @property
    def size(self) -> int:
        """The size of the part in that dimension."""
        return self.pieces * (self.stop - self.start)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the part."""
        return (*whole[: self.dim], self.size, *whole[self.dim + 1 :])

    def ranges(self, size: int) -> list[range]:
        """Returns the ranges of a dimension of so many."""
        each = size // self.pieces
        firsts = range(0, self.pieces * each, each) if each else ()
        return [range(at + self.start, at + self.stop) for at in firsts]

    def of(self, stored: Any, size: int) -> "Tensor":
        """Returns the part of a tensor, or of one in an open file, of which no more is
        read; `size` is that of the dimension.
        """
        import torch

        before = (slice(None),) * self.dim
        found: list[Tensor] = [
            stored[(*before, slice(one.start, one.stop))] for one in self.ranges(size)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)


@frozen(eq=False)
class RankPart:
    """A tensor of a checkpoint, as one rank reads it."""

    part: Part
    cut: Cut | None = None  # None: all of it
    # Biases of sums over ranks are added by one rank: they are zero here.
    is_zero: bool = False

    def fill(self, stored: "Tensor") -> None:
        """Put what was read in its place."""
        if self.is_zero:
            self.part.place.zero_()
            return
        if self.cut is not None:
            stored = padded(stored, self.part.shape, self.cut.dim)
        self.part.fill(stored)


def rank_parts(
    spec: ModelSpec, parts: Iterator[Part], whole: Mapping[str, Part]
) -> Iterator[RankPart]:
    """Yields the parts of a rank, whose sizes `spec` has; `whole` are those of the model
    by name. Raises `UnsupportedModelError` for a tensor that cannot be divided so.
    """
    for part in parts:
        if spec.place == WHOLE:
            yield RankPart(part)
            continue
        its = whole[part.name]
        if part.undivided:
            yield RankPart(evolve(its, place=part.place))
            continue
        cut = _cut(spec, part, its.shape)
        yield RankPart(part, cut, is_zero=part.once and spec.place.part > 0)


def padded(stored: "Tensor", shape: tuple[int, ...], dim: int) -> "Tensor":
    """Returns a tensor with zeros behind it in a dimension, up to this shape."""
    import torch

    missing = shape[dim] - stored.shape[dim]
    if not missing:
        return stored
    zeros = stored.new_zeros((*shape[:dim], missing, *shape[dim + 1 :]))
    return torch.cat((stored, zeros), dim)


def _cut(spec: ModelSpec, part: Part, whole: tuple[int, ...]) -> Cut | None:
    """Returns the part of a tensor of shape `whole` that a rank reads."""
    if part.name in (EMBED, LM_HEAD) and spec.place.parallel.tensor > 1:
        rows = spec.vocab_rows
        first = min(rows.start, spec.vocab_size)
        return Cut(0, first, min(rows.stop, spec.vocab_size))
    own = part.shape
    if own == whole:
        return None
    differing = [dim for dim, size in enumerate(whole) if own[dim] != size]
    dim, ranks = differing[0], spec.place.parallel.tensor
    if len(own) != len(whole) or len(differing) > 1 or whole[dim] % own[dim]:
        raise UnsupportedModelError(
            f"tensor {part.name} of shape {list(whole)} cannot be divided into parts of "
            f"shape {list(own)} for {ranks} ranks; use fewer (tensor_parallel_size)"
        )
    pieces = part.fused if dim == OUTPUTS else 1
    size = own[dim] // pieces
    slices = whole[dim] // own[dim]
    start = spec.place.part * slices // ranks * size
    return Cut(dim, start, start + size, pieces)
