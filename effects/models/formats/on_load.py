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

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        yield _part(f"{matrix}.weight", leaf)

    def expert_parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.expert_parts`."""
        yield _part(matrix, leaf)


def _part(name: str, leaf: Linear) -> WeightPart:
    """Returns a part that quantizes its matrix, or an expert's after another."""
    shape = (*leaf.weight.shape[:-1], leaf.inputs)

    def take(stored: "Tensor") -> None:
        if stored.dim() == 2:
            _store_each(leaf, stored)
            return
        for i, fused in enumerate(stored):
            _store_each(leaf.select(i), fused)

    return WeightPart(name, leaf.weight, shape=shape, take=take)


def _store_each(leaf: Linear, stored: "Tensor") -> None:
    """Quantize each of the matrices that are fused in a leaf into it."""
    matrices = stored.split_with_sizes(leaf.parts)
    for target, matrix in zip(leaf.pieces(), matrices, strict=True):
        _store(target, matrix)


def _store(target: Linear, matrix: "Tensor") -> None:
    """Quantize a matrix into its leaf."""
    from minfer.kernels.quantized import quantize

    stored = quantize(matrix.to(target.weight.device), target.scheme, matrix.dtype)
    target.weight.copy_(stored.weight)
    target.scaled.copy_(stored.scales)
    if target.zeros is not None and stored.zeros is not None:
        target.zeros.copy_(stored.zeros)
    if target.factors is not None and stored.factors is not None:
        target.factors.copy_(stored.factors)
