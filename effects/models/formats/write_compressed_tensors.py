"""Quantized matrices as compressed-tensors stores them: the tensors, and the config.

The names and values of the config are those of llm-compressor's schemes W8A8,
FP8_DYNAMIC, FP8_BLOCK and W4A16, which vLLM and transformers read.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.formats.compressed_tensors import METHOD
from minfer.effects.models.formats.fp8 import BLOCK
from minfer.kernels.leaves import FP8, FP8_BLOCKS, INT4_GROUPS, INT8, Scheme, int4

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.quantized import Stored

# The output head, under whatever prefix a model's modules have.
HEAD: Final = "re:.*lm_head$"


@frozen
class SchemeConfig:
    """How a config describes a scheme."""

    format: str
    weights: Mapping[str, Any]
    input_activations: Mapping[str, Any] | None  # None: they are not quantized


def _numbers(kind: str, bits: int, strategy: str, **changes: Any) -> dict[str, Any]:
    """Returns how weights or activations are quantized, in the fields of a config."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **changes,
    }


# The schemes that compressed-tensors has and minfer reads in it.
CONFIGS: Final[Mapping[Scheme, SchemeConfig]] = {
    FP8: SchemeConfig(
        "float-quantized",
        _numbers("float", 8, "channel"),
        _numbers("float", 8, "token", dynamic=True),
    ),
    FP8_BLOCKS: SchemeConfig(
        "float-quantized",
        _numbers("float", 8, "block", block_structure=[BLOCK, BLOCK]),
        _numbers("float", 8, "group", group_size=BLOCK, dynamic=True),
    ),
    INT8: SchemeConfig(
        "int-quantized",
        _numbers("int", 8, "channel"),
        _numbers("int", 8, "token", dynamic=True),
    ),
    **{
        int4(group): SchemeConfig(
            "pack-quantized", _numbers("int", 4, "group", group_size=group), None
        )
        for group in INT4_GROUPS
    },
}


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a model whose linear modules are all quantized
    by a scheme of `CONFIGS`, but for those in `ignore`: names, or `re:` and a regular
    expression.
    """
    config = CONFIGS[scheme]
    group = {
        "format": config.format,
        "input_activations": config.input_activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": config.weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": config.format,
        "global_compression_ratio": None,
        "ignore": [HEAD, *ignore],
        "kv_cache_scheme": None,
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def tensors_of(
    scheme: Scheme, stored: "Stored", shape: Sequence[int]
) -> "dict[str, Tensor]":
    """Returns the tensors that store a quantized matrix of that shape [outputs, inputs],
    by the ends of their names.
    """
    import torch

    if scheme.bits == 4:
        # Of the four bytes of an int32 the first is the lowest, as in the format.
        return {
            ".weight_packed": stored.weight.contiguous().view(torch.int32),
            ".weight_scale": stored.scales,
            ".weight_shape": torch.tensor(list(shape)),
        }
    scales = stored.scales[::BLOCK] if scheme is FP8_BLOCKS else stored.scales
    return {".weight": stored.weight, ".weight_scale": scales}
