"""GGUF's Q4_0: 4-bit integers in groups of 32, (number - 8) * scale, as minfer's `int4`.

gguf/hf_tensors.py maps such a matrix to two tensors. Scales are float16 in files and have
the dtype of activations in memory: float16 and float32 keep them exactly.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.protocol import UnstackedExperts
from minfer.effects.models.gguf.block_types import Q4_0
from minfer.effects.models.gguf.hf_tensors import NUMBERS, SCALES
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import Linear, Scheme, int4

METHOD: Final = "gguf"


@frozen
class Gguf(UnstackedExperts):
    """A matrix is two tensors: numbers and scales."""

    method: str = METHOD
    text: str = "GGUF Q4_0"
    shaped_by: str = ""
    markers: tuple[str, ...] = (NUMBERS,)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return int4(Q4_0.elements)

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        yield WeightPart(matrix + NUMBERS, leaf.weight, types=("U8",))
        yield WeightPart(matrix + SCALES, leaf.scaled)


def read_gguf_format(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Gguf:
    """Returns the format of GGUF files that have matrices of type Q4_0."""
    del reader, quant_config
    return Gguf()
