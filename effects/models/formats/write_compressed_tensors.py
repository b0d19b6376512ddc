"""Matrices as compressed-tensors stores them, and the config that says so.

The names and values of the config are those of llm-compressor's schemes W8A8,
FP8_DYNAMIC, FP8_BLOCK and W4A16, which vLLM and transformers read.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from minfer.effects.models.formats.compressed_tensors import METHOD
from minfer.effects.models.formats.fp8 import BLOCK
from minfer.kernels.leaves import FP8, FP8_BLOCKS, INT8, Scheme
from minfer.values.checks import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from minfer.kernels.quantized import Stored

# The output head, under whatever prefix a model's modules have.
HEAD: Final = "re:.*lm_head$"


@frozen
class SchemeConfig:
    """What a config says of a scheme."""

    stored_as: str
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None  # None: activations are not rounded


def scheme_config(scheme: Scheme) -> SchemeConfig:
    """Returns how compressed-tensors describes a scheme. Raises ConfigError for one that
    it cannot describe, or that minfer does not read in it.
    """
    if scheme is FP8:
        weights = _numbers("float", 8, "channel")
        return SchemeConfig("float-quantized", weights, _by_token("float"))
    if scheme is FP8_BLOCKS:
        weights = _numbers("float", 8, "block", block_structure=[BLOCK, BLOCK])
        inputs = _numbers("float", 8, "group", group_size=BLOCK, dynamic=True)
        return SchemeConfig("float-quantized", weights, inputs)
    if scheme is INT8:
        weights = _numbers("int", 8, "channel")
        return SchemeConfig("int-quantized", weights, _by_token("int"))
    if scheme.is_int4 and not scheme.zeros:
        weights = _numbers("int", 4, "group", group_size=scheme.group)
        return SchemeConfig("pack-quantized", weights, None)
    raise ConfigError(
        f"quantization {scheme.name!r} cannot be written: minfer reads no such matrices "
        f"from {METHOD} checkpoints; quantize as the checkpoint is loaded, with "
        f"--quantization"
    )


def config_of(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """Returns the `quantization_config` of a model whose linear modules are all quantized
    but those in `ignore`: names, or `re:` and a regular expression. Raises ConfigError.
    """
    how = scheme_config(scheme)
    group = {
        "format": how.stored_as,
        "input_activations": how.inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": how.weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": how.stored_as,
        "global_compression_ratio": None,
        "ignore": [HEAD, *ignore],
        "kv_cache_scheme": None,
        "quant_method": METHOD,
        "quantization_status": "compressed",
    }


def tensors_of(
    scheme: Scheme, stored: "Stored", shape: Sequence[int]
) -> "dict[str, Tensor]":
    """Returns the tensors of a matrix of that shape [outputs, inputs], by the ends of
    their names.
    """
    import torch

    if scheme.bits == 4:  # the bytes are in order: of each four, the first is the lowest
        return {
            ".weight_packed": stored.weight.contiguous().view(torch.int32),
            ".weight_scale": stored.scales,
            ".weight_shape": torch.tensor(list(shape)),
        }
    scales = stored.scales[::BLOCK] if scheme is FP8_BLOCKS else stored.scales
    return {".weight": stored.weight, ".weight_scale": scales}


def _by_token(kind: str) -> dict[str, Any]:
    return _numbers(kind, 8, "token", dynamic=True)


def _numbers(kind: str, bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **others,
    }
