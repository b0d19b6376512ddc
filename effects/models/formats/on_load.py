"""No format: matrices of an unquantized checkpoint are quantized as they are read."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import frozen

from minfer.effects.models.parts import Part
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class OnLoad:
    """One matrix at a time is in memory unquantized."""

    scheme: Scheme
    method: str = ""
    markers: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What people read."""
        return "quantized as it is loaded"

    def parts(self, matrix: str, by: Linear) -> Iterator[Part]:
        """See `Format.parts`."""
        yield _part(f"{matrix}.weight", by)

    def expert_parts(self, matrix: str, by: Linear) -> Iterator[Part]:
        """See `Format.expert_parts`."""
        yield _part(matrix, by)


def _part(name: str, by: Linear) -> Part:
    """Returns a part that quantizes its matrix, or an expert's after another."""
    shape = (*by.weight.shape[:-1], by.inputs)

    def take(stored: "Tensor") -> None:
        from minfer.kernels.quantized import quantize

        pieces = [(by, stored)]
        if stored.dim() == 3:
            pieces = [(by.select(i), one) for i, one in enumerate(stored)]
        for place, matrix in pieces:
            device = place.weight.device
            found = quantize(matrix.to(device), place.scheme, stored.dtype)
            place.weight.copy_(found.weight)
            place.scaled.copy_(found.scales)
            if place.zeros is not None and found.zeros is not None:
                place.zeros.copy_(found.zeros)

    return Part(name, by.weight, shape=shape, take=take)
