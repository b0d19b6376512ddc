"""What a recurrent layer keeps of a sequence, in parts: sizes alone, without torch.

A part is a number of *units* of one shape, each of which lies in one page of the cache:
the state of one head, or the last inputs of some channels of a convolution.
models/layout/state_layout.py places the parts of all layers in pages.
"""

from math import prod
from typing import Final, Literal

from attrs import frozen

DEFAULT_STATE_DTYPE: Final = "float32"
STATE_DTYPES: Final = (DEFAULT_STATE_DTYPE, "bfloat16")  # values of --state-dtype


@frozen
class StatePart:
    """One part of the state of one recurrent layer, of one rank."""

    name: str  # which part of its layer it is
    units: int
    shape: tuple[int, ...]  # of a unit, in elements
    # That of --state-dtype, for what is summed over the whole sequence; or that of
    # activations, for what is kept as it was computed.
    dtype: Literal["state", "activations"]

    @property
    def unit_elements(self) -> int:
        """Elements of a unit."""
        return prod(self.shape)
