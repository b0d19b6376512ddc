"""AWQ (Lin et al. 2023), as AutoAWQ writes it: [inputs, outputs / 8], eight outputs in an
int32, in an order of their own.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.int4_groups import Groups, read_groups, zeros_of
from minfer.effects.models.formats.keys import (
    MADE_WITH,
    PLAIN_ACTIVATIONS,
    RecentKeys,
    check_keys,
    words,
)
from minfer.effects.models.formats.packing import EACH, TYPES, in_bytes, unpacked
from minfer.effects.models.formats.protocol import OneByOne
from minfer.effects.models.parts import FLOATS, Part
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
# AutoAWQ's own quant_config.json, and its newer config.json, name these otherwise.
BITS, SIZES = ("bits", "w_bit"), ("group_size", "q_group_size")
VERSIONS: Final = ("version", "format", "checkpoint_format")
KEYS: Final = RecentKeys(
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
class Awq(OneByOne):
    """Tensors `qweight`, `qzeros` and `scales`."""

    groups: Groups
    method: str = "awq"
    text: str = "AWQ"
    shaped_by: str = "group_size"
    markers: tuple[str, ...] = (".qweight",)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return self.groups.scheme(zeros=True)

    def parts(self, matrix: str, by: Linear) -> Iterator[Part]:
        """See `Format.parts`."""
        outputs, groups = len(by.weight), self.groups.count(by)
        packed = -(-outputs // EACH)
        yield Part(
            f"{matrix}.qweight", by.weight, _weight, (by.inputs, packed), types=TYPES
        )
        zeros = Part(
            f"{matrix}.qzeros", zeros_of(by), _by_output, (groups, packed), types=TYPES
        )
        yield self.groups.spread(zeros, by)
        scales = Part(f"{matrix}.scales", by.scaled, _turned, (groups, outputs), FLOATS)
        yield self.groups.spread(scales, by)


def _by_output(stored: "Tensor") -> "Tensor":
    """Returns numbers [outputs, inputs or groups]."""
    return unpacked(stored, 1, ORDER).t()


def _weight(stored: "Tensor") -> "Tensor":
    return in_bytes(_by_output(stored))


def _turned(stored: "Tensor") -> "Tensor":
    return stored.t()


def read_awq(read: ConfigReader, how: Mapping[str, Any]) -> Awq:
    """Returns the format of a config with quant_method "awq". Raises
    `UnsupportedModelError`.
    """
    check_keys(read, "awq", how, KEYS)
    for key in VERSIONS:
        version = str(how.get(key) or "gemm").lower()
        if version != "gemm":
            what = f"quantization_config (awq): {key} {version!r} is not supported"
            raise read.refusal(f"{what}; 'gemm' is")
    bits, size = _named(read, how, BITS, 4), _named(read, how, SIZES, 128)
    return Awq(read_groups(read, "awq", bits, size))


def _named(
    read: ConfigReader, how: Mapping[str, Any], names: tuple[str, ...], default: int
) -> Any:
    """Returns the value under these names of one key, or the default. Raises
    `UnsupportedModelError` for two values.
    """
    found = {name: how[name] for name in names if how.get(name) is not None}
    first = next(iter(found.values()), default)
    if any(value != first for value in found.values()):
        raise read.refusal(f"quantization_config (awq): {found} are not the same")
    return first
