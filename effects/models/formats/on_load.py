"""No format: matrices of an unquantized checkpoint are quantized as they are read."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class OnLoad:
    """One matrix at a time is in memory unquantized."""

    scheme: Scheme
    method: str = ""
    shaped_by: str = ""
    markers: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    renamed: tuple[str, str] = ("", "")

    @property
    def text(self) -> str:
        """What people read."""
        return "quantized as it is loaded"

    def parts(self, matrix: str, by: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        yield _part(f"{matrix}.weight", by)

    def expert_parts(self, matrix: str, by: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.expert_parts`."""
        yield _part(matrix, by)


def _part(name: str, by: Linear) -> WeightPart:
    """Returns a part that quantizes its matrix, or an expert's after another."""
    shape = (*by.weight.shape[:-1], by.inputs)

    def take(stored: "Tensor") -> None:
        if stored.dim() == 2:
            _store(by, stored)
            return
        for i, fused in enumerate(stored):
            expert = by.select(i)
            matrices = fused.split_with_sizes(expert.parts)
            for place, matrix in zip(expert.pieces(), matrices, strict=True):
                _store(place, matrix)

    return WeightPart(name, by.weight, shape=shape, take=take)


def _store(place: Linear, matrix: "Tensor") -> None:
    """Quantize a matrix into its place."""
    from minfer.kernels.quantized import quantize

    found = quantize(matrix.to(place.weight.device), place.scheme, matrix.dtype)
    place.weight.copy_(found.weight)
    place.scaled.copy_(found.scales)
    if place.zeros is not None and found.zeros is not None:
        place.zeros.copy_(found.zeros)
