"""NVFP4: FP4 numbers in groups of 16 inputs, their scales in FP8, and one factor of a
matrix, as llm-compressor (compressed-tensors) and NVIDIA's Model Optimizer write it.

Both may describe activations in 4 bits as well. Here activations stay as they are, which
is more exact, so their scales are not read.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import frozen

from minfer.effects.models.formats.fp8 import TYPES as FP8_TYPES
from minfer.effects.models.formats.fp8 import of_all
from minfer.effects.models.formats.protocol import UnstackedExperts
from minfer.effects.models.parts import FLOATS, WeightPart
from minfer.kernels.leaves import NVFP4, Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

TYPES: Final = ("U8",)
# Of activations, in both ways of writing them, and of a cache of 8 bits.
INERT: Final = (".input_global_scale", ".input_scale", ".k_scale", ".v_scale")


@frozen
class Nvfp4(UnstackedExperts):
    """Tensors of numbers, two in a byte, of scales, and of the factor."""

    method: str
    weight: str  # how the name of the tensor of numbers ends
    factor: str  # and that of the factor
    divides: bool  # scales are divided by the factor, not multiplied with it
    shaped_by: str = "group_size"
    markers: tuple[str, ...] = (".weight_scale",)
    inert: tuple[str, ...] = INERT

    @property
    def text(self) -> str:
        """What people call it."""
        return f"{self.method}, NVFP4"

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return NVFP4

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        if leaf.factors is None:
            raise ValueError(f"a {leaf.scheme.name} matrix has no factors")
        outputs = len(leaf.weight)
        rows = partial(_divisor_of_all if self.divides else of_all, outputs)
        yield WeightPart(matrix + self.weight, leaf.weight, types=TYPES)
        yield WeightPart(f"{matrix}.weight_scale", leaf.scaled, types=FP8_TYPES)
        yield WeightPart(matrix + self.factor, leaf.factors, rows, (), FLOATS)


def _divisor_of_all(outputs: int, stored: "Tensor") -> "Tensor":
    """Returns the factor of each output, as the divisor of a matrix is stored."""
    return of_all(outputs, stored).reciprocal()
