"""The state that a recurrent sublayer sums over a whole sequence: its part, and the rates
at which it fades.
"""

from typing import TYPE_CHECKING, Final

from minfer.effects.models.architecture.state_parts import StatePart

if TYPE_CHECKING:
    from torch import Tensor

STATE: Final = "state"  # the part of a layer's state


def summed_state(units: int, shape: tuple[int, int]) -> StatePart:
    """Returns the part of `units` units: of the heads, or of groups of channels."""
    return StatePart(STATE, units, shape, "state")


def exponentials(stored: "Tensor") -> "Tensor":
    """Returns rates in float32, the exponentials of stored logarithms (`A_log`)."""
    return stored.float().exp()
