"""FP8 (E4M3) with a scale of a matrix, or of blocks of 128 x 128: as DeepSeek-V3, Kimi
K2, Qwen3 and Mistral Small 4 are published. The last has the matrices of all experts of a
layer in one tensor, [experts, outputs, inputs], and their scales, [experts, 1, 1], in
another, as transformers' `FP8Experts` has them.

Scales of activations that a checkpoint may have (static ones) are not used: a scale of
each token is at least as close.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.keys import FormatKeys, check_keys, words
from minfer.effects.models.parts import FLOATS, WeightPart
from minfer.kernels.leaves import FP8, FP8_BLOCKS, Linear, Scheme

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = FP8_BLOCKS.group
TYPES: Final = ("F8_E4M3",)
KINDS: Final = ("e4m3", "float8_e4m3", "float8_e4m3fn")
KEYS: Final = FormatKeys(
    read=words("quant_method weight_block_size fmt"),
    inert=words(
        "modules_to_not_convert ignored_layers ignore scale_fmt dequantize",
        "kv_cache_scheme",  # which prepare.py warns of
    ),
    neutral={"activation_scheme": ("dynamic", "static")},
)
SCALE_TYPES: Final = (*FLOATS, "F8_E8M0")  # the last are powers of two


@frozen
class Fp8:
    """Tensors `weight`, and `weight_scale_inv` of blocks or `weight_scale` of all; of all
    experts, a tensor without such an ending, and one whose name ends with `_scale_inv`.
    """

    blocks: bool
    method: Final = "fp8"
    shaped_by: Final = "weight_block_size"

    @property
    def text(self) -> str:
        """What people call it."""
        return f"FP8 in blocks of {BLOCK} x {BLOCK}" if self.blocks else "FP8"

    @property
    def scheme(self) -> Scheme:
        """How its matrices are kept in memory."""
        return FP8_BLOCKS if self.blocks else FP8

    @property
    def markers(self) -> tuple[str, ...]:
        """What unquantized matrices lack."""
        return (".weight_scale_inv", ".weight_scale")

    @property
    def inert(self) -> tuple[str, ...]:
        """Scales of activations, and of a cache of 8 bits."""
        activations = (".input_scale", ".activation_scale", "_proj_activation_scale")
        return (*activations, ".k_scale", ".v_scale")

    @property
    def renamed(self) -> tuple[str, str]:
        """transformers writes a matrix's scale under the name of those of blocks."""
        return ("", "") if self.blocks else (".weight_scale_inv", ".weight_scale")

    def parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.parts`."""
        yield WeightPart(f"{matrix}.weight", leaf.weight, types=TYPES)
        outputs, groups = leaf.scaled.shape
        shape: tuple[int, ...] = ()
        if self.blocks:
            shape, rows = (-(-outputs // BLOCK), groups), partial(of_rows, outputs)
            name = f"{matrix}.weight_scale_inv"
        else:
            rows = partial(of_all, outputs)
            name = f"{matrix}.weight_scale"
        yield WeightPart(name, leaf.scaled, rows, shape, SCALE_TYPES)

    def expert_parts(self, matrix: str, leaf: Linear) -> Iterator[WeightPart]:
        """See `WeightFormat.expert_parts`."""
        yield WeightPart(matrix, leaf.weight, types=TYPES)
        experts, outputs, groups = leaf.scaled.shape
        if self.blocks:
            shape, rows = (experts, -(-outputs // BLOCK), groups), of_rows
        else:
            shape, rows = (experts, 1, 1), of_all
        arrange = partial(rows, outputs)
        name = f"{matrix}_scale_inv"
        yield WeightPart(name, leaf.scaled, arrange, shape, SCALE_TYPES)


def of_rows(outputs: int, stored: "Tensor") -> "Tensor":
    """Returns the scales of blocks [..., blocks of outputs, groups] for each output."""
    return stored.float().repeat_interleave(BLOCK, -2)[..., :outputs, :]


def of_all(outputs: int, stored: "Tensor") -> "Tensor":
    """Returns the scale of a matrix, or each of [experts, 1, 1], for each output."""
    scales = stored.float().reshape(*stored.shape[:-2], 1, 1)
    return scales.expand(*scales.shape[:-2], outputs, 1)


def read_fp8(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Fp8:
    """Returns the format of a config with quant_method "fp8". Raises
    `UnsupportedModelError`.
    """
    check_keys(reader, "fp8", quant_config, KEYS)
    block = quant_config.get("weight_block_size")
    if block not in (None, [BLOCK, BLOCK]):
        fault = f"quantization_config (fp8): weight_block_size {block!r}"
        raise reader.refusal(f"{fault} is not supported; [{BLOCK}, {BLOCK}] and null are")
    if (kind := quant_config.get("fmt") or KINDS[0]) not in KINDS:
        fault = f"quantization_config (fp8): fmt {kind!r} is not supported"
        raise reader.refusal(f"{fault}; 'e4m3' is")
    return Fp8(blocks=block is not None)
