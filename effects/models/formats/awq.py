"""AWQ (Lin et al. 2023), as AutoAWQ writes it: [inputs, outputs / 8], eight outputs in an
int32, in an order of their own.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.int4_groups import Groups, read_groups, zeros_of
from minfer.effects.models.formats.packing import EACH, TYPES, in_bytes, unpacked
from minfer.effects.models.formats.protocol import OneByOne
from minfer.effects.models.parts import FLOATS, Part
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)


@frozen
class Awq(OneByOne):
    """Tensors `qweight`, `qzeros` and `scales`."""

    groups: Groups
    method: str = "awq"
    text: str = "AWQ"
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
    version = str(how.get("version") or "gemm").lower()
    if version != "gemm":
        what = f"quantization_config (awq): version {version!r} is not supported"
        raise read.refusal(f"{what}; 'gemm' is")
    bits = how.get("bits", how.get("w_bit", 4))
    return Awq(read_groups(read, "awq", bits, how.get("group_size", 128)))
