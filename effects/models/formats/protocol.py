"""What a format of quantized checkpoints is."""

from collections.abc import Iterator
from typing import Protocol

from minfer.effects.models.config_reader import UnsupportedModelError
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Scheme


class UnstackedExperts:
    """A format without tensors of the matrices of all experts."""

    @property
    def renamed(self) -> tuple[str, str]:
        """See `WeightFormat.renamed`."""
        return ("", "")

    def expert_parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.expert_parts`."""
        del leaf
        raise UnsupportedModelError(
            f"{matrix}: quantized matrices of all experts in one tensor are supported in "
            f"FP8 and MXFP4 alone; use a checkpoint with a tensor for each expert"
        )


class WeightFormat(Protocol):
    """How a checkpoint stores quantized matrices. A frozen value."""

    @property
    def method(self) -> str:
        """Its `quant_method` in configs."""

    @property
    def text(self) -> str:
        """What people call it: "AWQ"."""

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""

    @property
    def markers(self) -> tuple[str, ...]:
        """How names of tensors end that only quantized matrices have."""

    @property
    def renamed(self) -> tuple[str, str]:
        """How names of tensors end that are written in two ways: the other way, and the
        format's.
        """

    @property
    def shaped_by(self) -> str:
        """The keys of its config that shapes of tensors follow from; "": none."""

    @property
    def inert(self) -> tuple[str, ...]:
        """How names of further tensors end, which are not read."""

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """Yields the tensors of a matrix [outputs, inputs] of this name. Each part's rows
        are outputs, once arranged.
        """

    def expert_parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """Yields the tensors of the matrices [experts, outputs, inputs] of all experts of
        a layer, where these are one. Raises `UnsupportedModelError` if the format has no
        such tensors.
        """
