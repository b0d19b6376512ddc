"""AWQ (Lin et al. 2023), as AutoAWQ writes it: [inputs, outputs / 8], eight outputs in an
int32, in an order of their own.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.int4_groups import Int4Groups, read_groups, zeros_of
from minfer.effects.models.formats.keys import (
    MADE_WITH,
    PLAIN_ACTIVATIONS,
    FormatKeys,
    check_keys,
    words,
)
from minfer.effects.models.formats.packing import PER_INT32, TYPES, in_bytes, unpacked
from minfer.effects.models.formats.protocol import UnstackedExperts
from minfer.effects.models.parts import FLOATS, WeightPart
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
# AutoAWQ's own quant_config.json, and its newer config.json, name these otherwise.
BITS, SIZES = ("bits", "w_bit"), ("group_size", "q_group_size")
VERSIONS: Final = ("version", "format", "checkpoint_format")
KEYS: Final = FormatKeys(
    read=words("quant_method", *BITS, *SIZES, *VERSIONS),
    # Zero points are stored whether weights are symmetric or not.
    inert=MADE_WITH | words("zero_point sym"),
    neutral={
        **PLAIN_ACTIVATIONS,
        "method": ("awq",),
        "desc_act": (False,),
        "pack_dtype": ("int32",),
        "dynamic": ({},),
        "adapter": (),
        "rotation": (),
    },
)


@frozen
class Awq(UnstackedExperts):
    """Tensors `qweight`, `qzeros` and `scales`."""

    groups: Int4Groups
    method: str = "awq"
    text: str = "AWQ"
    shaped_by: str = "group_size"
    markers: tuple[str, ...] = (".qweight",)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return self.groups.scheme(zeros=True)

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        outputs, groups = len(leaf.weight), self.groups.count(leaf)
        packed = -(-outputs // PER_INT32)
        yield WeightPart(
            f"{matrix}.qweight", leaf.weight, _weight, (leaf.inputs, packed), types=TYPES
        )
        zeros = WeightPart(
            f"{matrix}.qzeros", zeros_of(leaf), _by_output, (groups, packed), types=TYPES
        )
        yield self.groups.spread(zeros, leaf)
        scales = WeightPart(
            f"{matrix}.scales", leaf.scaled, _transposed, (groups, outputs), FLOATS
        )
        yield self.groups.spread(scales, leaf)


def _by_output(stored: "Tensor") -> "Tensor":
    """Returns numbers [outputs, inputs or groups]."""
    return unpacked(stored, 1, ORDER).t()


def _weight(stored: "Tensor") -> "Tensor":
    return in_bytes(_by_output(stored))


def _transposed(stored: "Tensor") -> "Tensor":
    return stored.t()


def read_awq(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Awq:
    """Returns the format of a config with quant_method "awq". Raises
    `UnsupportedModelError`.
    """
    check_keys(reader, "awq", quant_config, KEYS)
    for key in VERSIONS:
        version = str(quant_config.get(key) or "gemm").lower()
        if version != "gemm":
            fault = f"quantization_config (awq): {key} {version!r} is not supported"
            raise reader.refusal(f"{fault}; 'gemm' is")
    bits = _named(reader, quant_config, BITS, 4)
    size = _named(reader, quant_config, SIZES, 128)
    return Awq(read_groups(reader, "awq", bits, size))


def _named(
    reader: ConfigReader,
    quant_config: Mapping[str, Any],
    names: tuple[str, ...],
    default: int,
) -> Any:
    """Returns the value under these names of one key, or the default. Raises
    `UnsupportedModelError` for two values.
    """
    values = {
        name: quant_config[name] for name in names if quant_config.get(name) is not None
    }
    first = next(iter(values.values()), default)
    if any(value != first for value in values.values()):
        raise reader.refusal(f"quantization_config (awq): {values} are not the same")
    return first
