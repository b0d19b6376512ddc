"""compressed-tensors, as llm-compressor writes it: integers of 4 bits in groups, of 8
bits with a scale of an output, FP8 with a scale of an output, a matrix or 128 x 128
numbers; and NVFP4.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader, UnsupportedModelError
from minfer.effects.models.formats.fp8 import BLOCK, of_all, of_rows
from minfer.effects.models.formats.fp8 import TYPES as FP8_TYPES
from minfer.effects.models.formats.int4_groups import Int4Groups, read_groups
from minfer.effects.models.formats.keys import FormatKeys, check_keys, words
from minfer.effects.models.formats.nvfp4 import Nvfp4
from minfer.effects.models.formats.packing import PER_INT32, in_bytes, unpacked
from minfer.effects.models.formats.packing import TYPES as PACKED_TYPES
from minfer.effects.models.formats.protocol import UnstackedExperts
from minfer.effects.models.parts import FLOATS, WeightPart
from minfer.kernels.leaves import FP8, FP8_BLOCKS, INT8, NVFP4, Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

METHOD: Final = "compressed-tensors"
KEY: Final = "quantization_config"  # in a config
GROUPS: Final = "config_groups"  # and in that
INT8_TYPES: Final = ("I8",)
ZERO_POINT: Final = ".weight_zero_point"
SIGNED_ZERO: Final = 8  # is 0 in numbers of 4 bits with a sign
KEYS: Final = FormatKeys(
    read=words(
        "quant_method config_groups format sparsity_config transform_config",
        "kv_cache_scheme",  # which prepare.py warns of
    ),
    inert=words("quantization_status global_compression_ratio ignore version"),
    neutral={"moe_sparsity_config": ()},
)
GROUP_KEYS: Final = FormatKeys(
    read=words("weights input_activations output_activations format"),
    inert=words("targets"),  # tensors' names say which matrices are; see `_of_mtp`
)
SPARSITY_KEYS: Final = FormatKeys(
    read=words("format"),
    inert=words("targets ignore global_sparsity sparsity_structure"),
)
TRANSFORM_KEYS: Final = FormatKeys(read=words("config_groups"))
_NUMBERS: Final = words("num_bits type symmetric group_size strategy block_structure")
_OBSERVED: Final = words("observer observer_kwargs scale_dtype zp_dtype")
WEIGHT_KEYS: Final = FormatKeys(
    read=_NUMBERS | words("actorder"), inert=_OBSERVED, neutral={"dynamic": (False,)}
)
INPUT_KEYS: Final = FormatKeys(
    read=_NUMBERS, inert=_OBSERVED | words("dynamic"), neutral={"actorder": (False,)}
)
Strategy = Literal["tensor", "channel", "block", "group"]
# How files store quantized matrices, as configs name it: eight numbers in an int32, or a
# number a byte.
PACKED: Final = "pack-quantized"
UNPACKED: Final = frozenset({"int-quantized", "float-quantized", "naive-quantized"})
FP4_PACKED: Final = "nvfp4-pack-quantized"
STORED_AS: Final = ("dense", PACKED, FP4_PACKED, *sorted(UNPACKED), "mixed-precision")
NVFP4_WEIGHTS: Final = Nvfp4(
    METHOD, ".weight_packed", ".weight_global_scale", divides=True
)


@frozen
class CompressedTensors(UnstackedExperts):
    """Tensors `weight` or `weight_packed`, `weight_scale`, and `weight_zero_point`."""

    scheme: Scheme
    scaled_by: Strategy
    groups: Int4Groups
    # Zero points are bytes with a sign, as older versions wrote them, not 4 bits.
    byte_zeros: bool = False
    method: str = METHOD
    shaped_by: str = "strategy, group_size, symmetric"
    markers: tuple[str, ...] = (".weight_scale",)
    # Sizes, static scales of activations, and those of a cache of 8 bits.
    inert: tuple[str, ...] = (
        ".weight_shape",
        ".input_scale",
        ".input_zero_point",
        ".k_scale",
        ".v_scale",
    )

    @property
    def text(self) -> str:
        """What people call it."""
        return f"compressed-tensors, {self.scheme.name}"

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        outputs, name = len(leaf.weight), f"{matrix}.weight_scale"
        if self.scheme.bits == 4:
            yield from self._packed(matrix, leaf)
            return
        types = INT8_TYPES if self.scheme is INT8 else FP8_TYPES
        yield WeightPart(f"{matrix}.weight", leaf.weight, types=types)
        if self.scaled_by == "block":
            shape = (-(-outputs // BLOCK), leaf.scaled.shape[1])
            yield WeightPart(name, leaf.scaled, partial(of_rows, outputs), shape, FLOATS)
        elif self.scaled_by == "tensor":
            yield WeightPart(name, leaf.scaled, partial(of_all, outputs), (1,), FLOATS)
        else:
            yield WeightPart(name, leaf.scaled, types=FLOATS)

    def _packed(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """Yields the tensors of integers of 4 bits."""
        outputs, groups = len(leaf.weight), self.groups.count(leaf)
        packed = (outputs, -(-leaf.inputs // PER_INT32))
        yield WeightPart(
            f"{matrix}.weight_packed", leaf.weight, _weight, packed, types=PACKED_TYPES
        )
        scales = WeightPart(
            f"{matrix}.weight_scale", leaf.scaled, shape=(outputs, groups)
        )
        yield self.groups.spread(scales, leaf)
        if leaf.zeros is None:
            return
        name = matrix + ZERO_POINT
        zeros = WeightPart(
            name,
            leaf.zeros,
            _zeros,
            (-(-outputs // PER_INT32), groups),
            types=PACKED_TYPES,
        )
        if self.byte_zeros:
            shape = (outputs, groups)
            zeros = WeightPart(name, leaf.zeros, _without_sign, shape, types=INT8_TYPES)
        yield self.groups.spread(zeros, leaf)


def _weight(stored: "Tensor") -> "Tensor":
    return in_bytes(unpacked(stored, 1))


def _zeros(stored: "Tensor") -> "Tensor":
    return unpacked(stored, 0)


def _without_sign(stored: "Tensor") -> "Tensor":
    return stored + SIGNED_ZERO


def read_compressed(
    reader: ConfigReader, quant_config: Mapping[str, Any]
) -> CompressedTensors | Nvfp4:
    """Returns the format of a config with quant_method "compressed-tensors". Raises
    `UnsupportedModelError`, `ModelConfigError`.
    """
    groups = quant_config.get(GROUPS)
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) for group in groups.values()
    ):
        raise reader.error("quantization_config", "an object with config_groups")
    check_keys(reader, METHOD, quant_config, KEYS)
    for name, group in groups.items():
        label, inputs = f"{METHOD}: {name}", group.get("input_activations")
        check_keys(reader, label, group, GROUP_KEYS)
        check_keys(reader, f"{label}: weights", group.get("weights"), WEIGHT_KEYS)
        check_keys(reader, f"{label}: input_activations", inputs, INPUT_KEYS)
    _check_further(reader, quant_config)
    read = [group for group in groups.values() if not _of_mtp(group)]
    formats = {_read_scheme(reader, group) for group in read}
    for group in read:
        _check_stored(reader, group, group.get("format") or quant_config.get("format"))
    if len(formats) != 1:
        raise _refusal(reader, f"{len(formats)} ways in one model are", "one is")
    return formats.pop()


def config_of_mtp(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns a config that says of all matrices what this one says of those of layers
    that predict further tokens; None: it says nothing else of them than of others.
    """
    quant_config = config.get(KEY)
    if not isinstance(quant_config, dict):
        return None
    groups = quant_config.get(GROUPS)
    if not isinstance(groups, dict):
        return None
    own = {
        name: {**group, "targets": ["Linear"]}
        for name, group in groups.items()
        if isinstance(group, dict) and _of_mtp(group)
    }
    return {**config, KEY: {**quant_config, GROUPS: own}} if own else None


def _of_mtp(group: Mapping[str, Any]) -> bool:
    """Whether a group is of layers alone that predict further tokens, which are not the
    model's.
    """
    targets = group.get("targets")
    return (
        isinstance(targets, list)
        and bool(targets)
        and all(isinstance(target, str) and "mtp" in target for target in targets)
    )


def _check_further(reader: ConfigReader, quant_config: Mapping[str, Any]) -> None:
    """Refuse what matrices are beside quantized: sparse, or rotated."""
    sparsity = quant_config.get("sparsity_config")
    transforms = quant_config.get("transform_config")
    check_keys(reader, f"{METHOD}: sparsity_config", sparsity, SPARSITY_KEYS)
    check_keys(reader, f"{METHOD}: transform_config", transforms, TRANSFORM_KEYS)
    kind = sparsity.get("format") if isinstance(sparsity, dict) else sparsity
    if kind not in (None, "dense"):
        raise _refusal(reader, f"sparsity_config with format {kind!r} is", "'dense' is")
    if isinstance(transforms, dict):
        transforms = transforms.get("config_groups")
    if transforms:
        raise _refusal(reader, "transform_config is", "a checkpoint without it is")
    for config in (quant_config, *quant_config["config_groups"].values()):
        if (stored := config.get("format")) not in (None, *STORED_AS):
            raise _refusal(reader, f"format {stored!r} is", f"{', '.join(STORED_AS)} are")
        if config.get("output_activations"):
            raise _refusal(reader, "output_activations are", "input_activations are")


def _check_stored(reader: ConfigReader, group: Mapping[str, Any], stored: object) -> None:
    """Refuse numbers that are packed where minfer reads a number a byte, or the other
    way round. Raises `UnsupportedModelError`.
    """
    weights = group.get("weights")
    if stored not in UNPACKED | {PACKED} or not isinstance(weights, dict):
        return
    bits = weights.get("num_bits")
    if (bits, stored == PACKED) in ((4, False), (8, True)):
        alternative = (
            f"{PACKED!r} is" if bits == 4 else f"{', '.join(sorted(UNPACKED))} are"
        )
        raise _refusal(
            reader, f"format {stored!r} of weights with {bits} bits is", alternative
        )


def _read_scheme(
    reader: ConfigReader, group: Mapping[str, Any]
) -> CompressedTensors | Nvfp4:
    """Returns the format of one of a config's groups."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise _refusal(reader, "a group without weights is", "4 and 8 bits are")
    if not isinstance(inputs, dict | None):
        raise _refusal(
            reader, f"input_activations {inputs!r} are", "an object or null is"
        )
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if strategy is None:
        strategy = "group" if weights.get("group_size") else "tensor"
    match (kind, bits, strategy):
        case ("int", 4, "group" | "channel"):
            return _read_int4(reader, weights, inputs)
        case ("float", 4, "tensor_group") if _is_symmetric(reader, weights):
            if (size := weights.get("group_size")) != NVFP4.group:
                raise _refusal(reader, f"group_size {size!r} is", f"{NVFP4.group} is")
            return NVFP4_WEIGHTS
        case ("float" | "int", 8, _) if inputs and (
            inputs.get("type") != kind or inputs.get("num_bits") != bits
        ):
            activations = f"{inputs.get('type')!r} with {inputs.get('num_bits')!r} bits"
            fault = f"weights of type {kind!r} with 8 bits and activations of type"
            raise _refusal(reader, f"{fault} {activations} are", "both alike are")
        case ("float", 8, "tensor" | "channel") if inputs:
            return CompressedTensors(FP8, strategy, Int4Groups(0))
        case ("float", 8, "block") if inputs:
            if weights.get("block_structure") != [BLOCK, BLOCK]:
                fault = f"block_structure {weights.get('block_structure')!r} is"
                raise _refusal(reader, fault, f"[{BLOCK}, {BLOCK}] is")
            return CompressedTensors(FP8_BLOCKS, strategy, Int4Groups(0))
        case ("int", 8, "tensor" | "channel") if inputs and _is_symmetric(
            reader, weights
        ):
            return CompressedTensors(INT8, strategy, Int4Groups(0))
    rounded = "rounded" if inputs else "not rounded"
    fault = f"weights of type {kind!r} with {bits!r} bits by {strategy!r}"
    alternatives = (
        "4-bit integers by group or channel with activations not rounded, FP8 and "
        "symmetric INT8 with activations rounded, and NVFP4, are"
    )
    raise _refusal(reader, f"{fault}, activations {rounded}, are", alternatives)


def _read_int4(
    reader: ConfigReader, weights: Mapping[str, Any], inputs: object
) -> CompressedTensors:
    """Returns the format of integers of 4 bits."""
    if inputs:
        raise _refusal(
            reader, "4-bit weights with activations rounded are", "not rounded, they are"
        )
    if (order := weights.get("actorder")) not in (None, False, "weight", "static"):
        fault = f"inputs ordered by activation (actorder {order!r}) are"
        raise _refusal(reader, fault, "null, 'weight' and 'static' are")
    groups = read_groups(reader, METHOD, 4, weights.get("group_size"))
    zeros = not _is_symmetric(reader, weights)
    return CompressedTensors(groups.scheme(zeros=zeros), "group", groups)


def _is_symmetric(reader: ConfigReader, weights: Mapping[str, Any]) -> bool:
    """Returns whether 0 is stored as the middle number; absent: it is."""
    symmetric = weights.get("symmetric")
    if not isinstance(symmetric, bool | None):
        raise _refusal(reader, f"symmetric {symmetric!r} is", "true and false are")
    return symmetric is not False


def _refusal(reader: ConfigReader, fault: str, supported: str) -> UnsupportedModelError:
    return reader.refusal(
        f"quantization_config ({METHOD}): {fault} not supported; {supported}"
    )
