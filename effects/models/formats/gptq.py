"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it: [inputs / 8, outputs],
eight inputs in an int32. In the first version zeros are stored minus one.

With `desc_act`, a group's inputs are not beside one another. Such checkpoints are refused
by name, also where only their tensors show it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.formats.int4_groups import Groups, read_groups, zeros_of
from minfer.effects.models.formats.packing import EACH, TYPES, in_bytes, unpacked
from minfer.effects.models.formats.protocol import OneByOne
from minfer.effects.models.parts import FLOATS, Part
from minfer.kernels.leaves import Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor


@frozen
class Gptq(OneByOne):
    """Tensors `qweight`, `qzeros`, `scales` and `g_idx`."""

    groups: Groups
    less_one: bool  # zeros
    method: str = "gptq"
    text: str = "GPTQ"
    markers: tuple[str, ...] = (".qweight",)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return self.groups.scheme(zeros=True)

    def parts(self, matrix: str, by: Linear) -> Iterator[Part]:
        """See `Format.parts`."""
        outputs, inputs, groups = len(by.weight), by.inputs, self.groups.count(by)
        yield Part(
            f"{matrix}.qweight",
            by.weight,
            _weight,
            (-(-inputs // EACH), outputs),
            types=TYPES,
        )
        zeros = Part(
            f"{matrix}.qzeros",
            zeros_of(by),
            partial(_zeros, self.less_one),
            (groups, -(-outputs // EACH)),
            types=TYPES,
        )
        yield self.groups.spread(zeros, by)
        scales = Part(f"{matrix}.scales", by.scaled, _turned, (groups, outputs), FLOATS)
        yield self.groups.spread(scales, by)
        name = f"{matrix}.g_idx"
        check = partial(_check_order, name, inputs // groups)
        yield Part(
            name,
            by.scaled,
            shape=(inputs,),
            types=TYPES,
            take=check,
            optional=True,
            by_output=False,
            undivided=True,
        )


def _weight(stored: "Tensor") -> "Tensor":
    return in_bytes(unpacked(stored, 0).t())


def _zeros(less_one: bool, stored: "Tensor") -> "Tensor":
    return (unpacked(stored, 1).t() + less_one) & 15


def _turned(stored: "Tensor") -> "Tensor":
    return stored.t()


def _check_order(name: str, group: int, stored: "Tensor") -> None:
    """Refuse groups of inputs that are not beside one another."""
    import torch

    places = torch.arange(len(stored), device=stored.device)
    if not stored.equal((places // group).to(stored.dtype)):
        raise UnsupportedModelError(f"tensor {name}: {_ORDERED}")


_ORDERED = (
    "inputs are ordered by activation (desc_act), which is not supported; use a "
    "checkpoint with desc_act false, or the unquantized one with --quantization int4"
)


def read_gptq(read: ConfigReader, how: Mapping[str, Any]) -> Gptq:
    """Returns the format of a config with quant_method "gptq". Raises
    `UnsupportedModelError`.
    """
    groups = read_groups(read, "gptq", how.get("bits"), how.get("group_size", 128))
    if how.get("desc_act") and groups.size:
        raise read.refusal(f"quantization_config (gptq): {_ORDERED}")
    version = how.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        what = f"quantization_config (gptq): checkpoint_format {version!r}"
        raise read.refusal(f"{what} is not supported; 'gptq' and 'gptq_v2' are")
    return Gptq(groups, less_one=version == "gptq")
