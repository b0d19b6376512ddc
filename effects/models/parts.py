"""The tensors of a checkpoint as parts of a model's weights: names, shapes, targets."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from minfer.effects.models.config_reader import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

NOT_A_NUMBER: Final = 255  # of exponents in 8 bits
FLOATS: Final = ("BF16", "F16", "F32", "F64")  # types of safetensors files


@frozen
class Renaming:
    """A part of tensors' names that some checkpoints write otherwise."""

    pattern: str  # a regular expression
    name: str  # what the model has in its place


@frozen(eq=False)
class WeightPart:
    """One tensor of a checkpoint."""

    name: str  # there
    target: "Tensor"  # where it goes: a view into the weights
    # Brings the checkpoint's tensor into the form of `target`; None: it has that form.
    arrange: "Callable[[Tensor], Tensor] | None" = None
    _shape: tuple[int, ...] | None = None  # in the checkpoint; None: that of `target`
    types: tuple[str, ...] = FLOATS  # that the checkpoint may store it in
    matrix: str = ""  # the name of the matrix that it belongs to, if it can be quantized
    # Takes the arranged tensor, instead of a copy to `target`: of a matrix that is
    # quantized as it is read.
    take: "Callable[[Tensor], None] | None" = None
    optional: bool = False  # a checkpoint may lack it
    # How ranks divide it, if they do (rank_parts.py):
    fused: int = 1  # matrices of an expert, one below the other: divided one by one
    # Outputs of matrices that a checkpoint stores as one: they are divided one by one.
    pieces: tuple[int, ...] = ()
    on_one_rank: bool = False  # the bias of a sum over ranks, which one of them adds
    undivided: bool = False  # every rank reads all of it
    scales: bool = False  # of a quantized matrix, which have to be finite
    by_output: bool = True  # a matrix's outputs are its first dimension, once arranged

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        return tuple(self.target.shape) if self._shape is None else self._shape

    @property
    def is_copy(self) -> bool:
        """Whether the checkpoint's numbers are copied as they are."""
        return self.arrange is None and self.take is None

    def with_prefix(self, prefix: str) -> "WeightPart":
        """Returns the same part, its names behind a prefix."""
        matrix = prefix + self.matrix if self.matrix else ""
        return evolve(self, name=prefix + self.name, matrix=matrix)

    def rearranged(self, order: "Callable[[Tensor], Tensor] | None") -> "WeightPart":
        """Returns the same part, its outputs rearranged by `order` at last, if given."""
        if order is None or not self.by_output:
            return self
        first = self.arrange
        return evolve(
            self, arrange=order if first is None else lambda stored: order(first(stored))
        )

    def fill(self, stored: "Tensor") -> None:
        """Copy the checkpoint's tensor to its target, cast where dtypes differ. Raises
        `CheckpointError` for scales that are not finite, and what its format refuses.
        """
        stored = stored.reshape(self.shape)  # of one number, another shape is accepted
        try:
            arranged = stored if self.arrange is None else self.arrange(stored)
            if self.take is not None:
                self.take(arranged)
                return
        except CheckpointError as error:
            raise type(error)(f"tensor {self.name}: {error}") from error
        self.target.copy_(arranged)
        self.check()

    def check(self) -> None:
        """Raise `CheckpointError` for scales in `target` that are not finite."""
        if self.scales and not _are_finite(self.target):
            kind = str(self.target.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {self.name}: scales are NaN or infinite in {kind}; download it "
                f"again, or use another dtype"
            )


def _are_finite(scales: "Tensor") -> bool:
    if scales.dtype.is_floating_point:
        return bool(scales.float().isfinite().all())
    return bool((scales != NOT_A_NUMBER).all())
