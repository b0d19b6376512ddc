"""What AWQ, GPTQ and compressed-tensors have in common: integers of 4 bits in groups."""

from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader, whole_to_int
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import INT4_GROUPS, Linear, Scheme, int4

if TYPE_CHECKING:
    from torch import Tensor

ALL_INPUTS: Final = -1  # of an output, in one group
# Groups that all inputs of an output are cut into, which then have equal scales: of the
# size that divides most numbers of inputs.
MIN_GROUP: Final = min(INT4_GROUPS)


@frozen
class Int4Groups:
    """The groups of a checkpoint."""

    size: int  # in inputs; 0: all inputs of an output

    def scheme(self, *, zeros: bool) -> Scheme:
        """Returns how minfer keeps them."""
        return int4(self.size or MIN_GROUP, zeros=zeros)

    def count(self, leaf: Linear) -> int:
        """Returns the groups of an output in the checkpoint."""
        return leaf.inputs // self.size if self.size else 1

    def spread(self, weight_part: WeightPart, leaf: Linear) -> WeightPart:
        """Returns a part of values [outputs, groups], with one for each of minfer's
        groups.
        """
        if self.size:
            return weight_part
        return weight_part.rearranged(partial(_repeated, leaf.scaled.shape[1]))


def zeros_of(leaf: Linear) -> "Tensor":
    """Returns the numbers that mean 0. Raises ValueError if the groups have none."""
    if leaf.zeros is None:
        raise ValueError(f"groups of {leaf.scheme.name} have no zeros")
    return leaf.zeros


def _repeated(groups: int, values: "Tensor") -> "Tensor":
    return values.expand(len(values), groups)


def read_groups(
    reader: ConfigReader, method: str, bits: object, size: object
) -> Int4Groups:
    """Returns the groups of a config. Raises `UnsupportedModelError` for others than
    minfer's.
    """
    if bits != 4:
        fault = f"quantization_config ({method}): {bits!r} bits are not supported"
        raise reader.refusal(f"{fault}; 4 are")
    if size in (ALL_INPUTS, None):
        return Int4Groups(0)
    if (size := whole_to_int(size)) not in INT4_GROUPS:
        supported = ", ".join(map(str, INT4_GROUPS))
        fault = f"quantization_config ({method}): group_size {size!r} is not supported"
        raise reader.refusal(f"{fault}; {supported} and {ALL_INPUTS} are")
    return Int4Groups(int(str(size)))
