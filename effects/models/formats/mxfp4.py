"""MXFP4, as gpt-oss is published: the matrices of all experts, [experts, outputs, groups,
16 bytes], and an exponent for each group of 32.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.formats.keys import FormatKeys, check_keys, words
from minfer.effects.models.parts import WeightPart
from minfer.kernels.leaves import MXFP4, Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

TYPES: Final = ("U8",)
KEYS: Final = FormatKeys(
    read=words("quant_method"), inert=words("modules_to_not_convert dequantize")
)


@frozen
class Mxfp4:
    """Tensors `_blocks` and `_scales` of experts."""

    scheme: Scheme = MXFP4
    method: str = "mxfp4"
    text: str = "MXFP4"
    shaped_by: str = ""
    markers: tuple[str, ...] = ("_blocks",)
    inert: tuple[str, ...] = ()
    renamed: tuple[str, str] = ("", "")

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        del leaf
        raise UnsupportedModelError(
            f"{matrix}: MXFP4 matrices other than those of all experts of a layer in one "
            f"tensor, as gpt-oss is published, are not supported"
        )

    def expert_parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.expert_parts`."""
        shape = (*leaf.scaled.shape, MXFP4.group // MXFP4.numbers)
        yield WeightPart(f"{matrix}_blocks", leaf.weight, _flat, shape, TYPES)
        yield WeightPart(f"{matrix}_scales", leaf.scaled, types=TYPES)


def _flat(stored: "Tensor") -> "Tensor":
    """Returns bytes [experts, outputs, inputs / 2]."""
    return stored.flatten(-2)


def read_mxfp4(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Mxfp4:
    """Returns the format of a config with quant_method "mxfp4"."""
    check_keys(reader, "mxfp4", quant_config, KEYS)
    return Mxfp4()
