"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel write it: [inputs / 8, outputs],
eight inputs in an int32. In the first version zeros are stored minus one.

With `sym`, 0 is always stored as the number 8: zeros are not written by all tools in the
version that the config names, so both ways of storing 8 are read as it. A config without
`sym` leaves it to the zeros: 8 in one of these ways in all groups of a matrix is `sym`.
With `sym` false, zeros are as the version says; but all of them 9, stored as 8, are
refused, as they are of symmetric weights in the other version.

With `desc_act`, a group's inputs are not beside one another, unless `static_groups` made
the groups before the inputs were ordered. Such checkpoints are refused by name, also
where only their tensors show it.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import (
    CheckpointError,
    ConfigReader,
    UnsupportedModelError,
)
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

SYMMETRIC_ZERO: Final = 8  # is 0 where weights are symmetric
KEYS: Final = FormatKeys(
    read=words(
        "quant_method bits group_size desc_act static_groups sym checkpoint_format",
        "dynamic",
    ),
    inert=MADE_WITH,
    neutral={
        **PLAIN_ACTIVATIONS,
        "method": ("gptq",),
        "format": ("gptq", "gptq_v2"),
        "is_marlin_format": (False,),
        "pack_dtype": ("int32",),
        "adapter": (),
        "rotation": (),
    },
)


@frozen
class Gptq(UnstackedExperts):
    """Tensors `qweight`, `qzeros`, `scales` and `g_idx`."""

    groups: Int4Groups
    less_one: bool  # zeros
    symmetric: bool | None = None  # None: not known
    ordered: bool = False  # inputs were, after groups were made
    method: str = "gptq"
    text: str = "GPTQ"
    shaped_by: str = "group_size"
    markers: tuple[str, ...] = (".qweight",)
    inert: tuple[str, ...] = ()

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return self.groups.scheme(zeros=True)

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        outputs, inputs, groups = len(leaf.weight), leaf.inputs, self.groups.count(leaf)
        yield WeightPart(
            f"{matrix}.qweight",
            leaf.weight,
            _weight,
            (-(-inputs // PER_INT32), outputs),
            types=TYPES,
        )
        zeros = WeightPart(
            f"{matrix}.qzeros",
            zeros_of(leaf),
            self._zeros,
            (groups, -(-outputs // PER_INT32)),
            types=TYPES,
        )
        yield self.groups.spread(zeros, leaf)
        scales = WeightPart(
            f"{matrix}.scales", leaf.scaled, _transposed, (groups, outputs), FLOATS
        )
        yield self.groups.spread(scales, leaf)
        yield WeightPart(
            f"{matrix}.g_idx",
            leaf.scaled,
            shape=(inputs,),
            types=TYPES,
            take=partial(_check_order, inputs // groups),
            optional=not self.ordered,
            by_output=False,
            undivided=True,
        )

    def _zeros(self, stored: "Tensor") -> "Tensor":
        """Returns the numbers that mean 0. Raises `CheckpointError` for symmetric weights
        with others than 8.
        """
        import torch

        numbers = unpacked(stored, 1).t()
        low, high = (int(number) for number in numbers.aminmax())
        is_middle = low == high and high in (SYMMETRIC_ZERO - 1, SYMMETRIC_ZERO)
        if self.symmetric is False and self.less_one and low == high == SYMMETRIC_ZERO:
            raise CheckpointError(_DOUBTFUL)
        if self.symmetric is False or (self.symmetric is None and not is_middle):
            return (numbers + self.less_one) & 15
        if not is_middle:
            raise CheckpointError(
                f"zero points from {low} to {high}, although sym is true, with which all "
                f"are {SYMMETRIC_ZERO}; set sym to false if they are meant"
            )
        return torch.full_like(numbers, SYMMETRIC_ZERO)


def _weight(stored: "Tensor") -> "Tensor":
    return in_bytes(unpacked(stored, 0).t())


def _transposed(stored: "Tensor") -> "Tensor":
    return stored.t()


def _check_order(group: int, stored: "Tensor") -> None:
    """Refuse groups of inputs that are not beside one another."""
    import torch

    inputs = torch.arange(len(stored), device=stored.device)
    if not stored.equal((inputs // group).to(stored.dtype)):
        raise UnsupportedModelError(_ORDERED)


_DOUBTFUL = (
    f"all zero points are stored as {SYMMETRIC_ZERO}, which mean {SYMMETRIC_ZERO + 1} in "
    f"checkpoint_format 'gptq', as no weights without sym have them; if they mean "
    f"{SYMMETRIC_ZERO}, set sym to true, or checkpoint_format to 'gptq_v2'"
)
_ORDERED = (
    "inputs are ordered by activation (desc_act), which is not supported; use a "
    "checkpoint with desc_act false, or the unquantized one with --quantization int4"
)


def read_gptq(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Gptq:
    """Returns the format of a config with quant_method "gptq". Raises
    `UnsupportedModelError`.
    """
    check_keys(reader, "gptq", quant_config, KEYS)
    groups = read_groups(
        reader, "gptq", quant_config.get("bits"), quant_config.get("group_size", 128)
    )
    _check_modules(reader, quant_config)
    flags = ConfigReader(quant_config, f"{reader.source}: quantization_config (gptq)")
    ordered = flags.flag("desc_act") and bool(groups.size)
    if ordered and not flags.flag("static_groups"):
        raise reader.refusal(f"quantization_config (gptq): {_ORDERED}")
    version = (
        quant_config.get("checkpoint_format") or quant_config.get("format") or "gptq"
    )
    if version not in ("gptq", "gptq_v2"):
        fault = f"quantization_config (gptq): checkpoint_format {version!r}"
        raise reader.refusal(f"{fault} is not supported; 'gptq' and 'gptq_v2' are")
    symmetric = None if flags.is_absent("sym") else flags.flag("sym")
    return Gptq(groups, less_one=version == "gptq", symmetric=symmetric, ordered=ordered)


def _check_modules(reader: ConfigReader, quant_config: Mapping[str, Any]) -> None:
    """Refuse modules that are quantized otherwise than the rest (`dynamic`). Those that
    are not quantized, the tensors show. Raises `UnsupportedModelError`.
    """
    rules = quant_config.get("dynamic") or {}
    if not isinstance(rules, dict):
        raise reader.refusal(
            f"quantization_config (gptq): dynamic {rules!r} is no object"
        )
    for modules, changes in rules.items():
        if modules.startswith("-:"):
            continue
        if not isinstance(changes, dict | None):
            raise reader.refusal(
                f"quantization_config (gptq): dynamic: {modules!r} must have an object "
                f"or null, found {changes!r}"
            )
        for key, value in (changes or {}).items():
            if key not in MADE_WITH and value != quant_config.get(key):
                raise reader.refusal(
                    f"quantization_config (gptq): dynamic: {key} {value!r} of the "
                    f"modules {modules!r} is not supported beside "
                    f"{quant_config.get(key)!r} of the others; use a checkpoint with "
                    f"one {key} for all"
                )
