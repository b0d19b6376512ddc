"""The types of GGUF files that stay in 4 bits: Q4_0, integers in groups of 32, (number -
8) * scale, as minfer's `int4`; and MXFP4.

gguf/hf_tensors.py maps such a matrix to two tensors. Q4_0's scales are float16 in files
and have the dtype of activations in memory: float16 and float32 keep them exactly.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.protocol import UnstackedExperts
from minfer.effects.models.gguf.block_types import MXFP4 as FP4
from minfer.effects.models.gguf.block_types import Q4_0, BlockType
from minfer.effects.models.gguf.hf_tensors import NUMBERS, SCALES
from minfer.effects.models.parts import FLOATS, WeightPart
from minfer.kernels.leaves import MXFP4, Linear, Scheme, int4

METHOD: Final = "gguf"
KEPT_KEY: Final = "kept"  # in the config: the name of the type that stays in 4 bits


@frozen
class Gguf(UnstackedExperts):
    """A matrix is two tensors: numbers and scales."""

    kept: BlockType = Q4_0
    method: str = METHOD
    shaped_by: str = ""
    markers: tuple[str, ...] = (NUMBERS,)
    inert: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """See `WeightFormat.text`."""
        return f"GGUF {self.kept.name}"

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return MXFP4 if self.kept is FP4 else int4(Q4_0.elements)

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        yield WeightPart(matrix + NUMBERS, leaf.weight, types=("U8",))
        types = ("U8",) if self.kept is FP4 else FLOATS
        yield WeightPart(matrix + SCALES, leaf.scaled, types=types)


def read_gguf_format(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Gguf:
    """Returns the format of GGUF files that have matrices of 4 bits."""
    del reader
    return Gguf(FP4 if quant_config.get(KEPT_KEY) == FP4.name else Q4_0)
