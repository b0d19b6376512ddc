"""Causal convolutions of a recurrent sublayer: their state, and their weights."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING, Final

from minfer.effects.models.architecture.state_parts import StatePart
from minfer.effects.models.parts import WeightPart

if TYPE_CHECKING:
    from torch import Tensor

CONVOLUTION: Final = "convolution"  # the part of a layer's state
MAX_CHANNELS: Final = 128  # of a unit of the state


def conv_state(channels: int, width: int) -> StatePart:
    """Returns what a convolution over `width` inputs keeps of a sequence: the last
    `width - 1` inputs of each channel. Units are small, so that pages have little
    padding.
    """
    of_unit = gcd(channels, MAX_CHANNELS)
    shape = (width - 1, of_unit)
    return StatePart(CONVOLUTION, channels // of_unit, shape, "activations")


def conv_parts(
    name: str,
    weight: "Tensor",
    bias: "Tensor | None" = None,
    pieces: tuple[int, ...] = (),
) -> Iterator[WeightPart]:
    """Yields the tensors of a convolution in a layer of a checkpoint, with their targets:
    its weight [channels, width], which is [channels, 1, width] there, and its bias
    [channels]. `pieces`: numbers of consecutive channels, each of which ranks divide by
    itself.
    """
    shape = (len(weight), 1, weight.shape[1])
    yield WeightPart(f"{name}.weight", weight, _without_middle, shape, pieces=pieces)
    if bias is not None:
        yield WeightPart(f"{name}.bias", bias, pieces=pieces)


def _without_middle(stored: "Tensor") -> "Tensor":
    return stored.squeeze(1)
