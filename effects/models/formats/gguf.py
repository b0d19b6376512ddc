"""GGUF's Q4_0, which is minfer's 4-bit integers in groups of 32: (number - 8) * scale.

gguf/shown.py shows such matrices as two tensors. Scales are float16 in files; under
activations in float16 or float32 nothing is lost.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.protocol import OneByOne
from minfer.effects.models.gguf.block_types import Q4_0
from minfer.effects.models.gguf.shown import NUMBERS, SCALES
from minfer.effects.models.parts import Part
from minfer.kernels.leaves import Linear, Scheme, int4

METHOD: Final = "gguf"


@frozen
class Gguf(OneByOne):
    """Two tensors a matrix."""

    method: str = METHOD
    text: str = "GGUF Q4_0"
    markers: tuple[str, ...] = (NUMBERS,)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return int4(Q4_0.elements)

    def parts(self, matrix: str, by: Linear) -> Iterator[Part]:
        """See `Format.parts`."""
        yield Part(matrix + NUMBERS, by.weight, types=("U8",))
        yield Part(matrix + SCALES, by.scaled)


def read_gguf_format(read: ConfigReader, how: Mapping[str, Any]) -> Gguf:
    """Returns the format of a GGUF file with matrices of type Q4_0."""
    del read, how
    return Gguf()
