"""The places of a checkpoint's tensors in a model's weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from torch import Tensor


@frozen(eq=False)
class Part:
    """One tensor of a checkpoint."""

    name: str  # there
    place: "Tensor"  # where it goes: a view into the weights
    # Brings the checkpoint's tensor into the form of `place`; None: it has that form.
    arrange: "Callable[[Tensor], Tensor] | None" = None
    _shape: tuple[int, ...] | None = None  # in the checkpoint; None: that of `place`

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return tuple(self.place.shape) if self._shape is None else self._shape

    def under(self, prefix: str) -> "Part":
        """Returns the same part, its name behind a prefix."""
        return evolve(self, name=prefix + self.name)
