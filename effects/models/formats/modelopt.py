"""NVIDIA's Model Optimizer: its FP8, whose tensors are those of `fp8` with one scale of a
matrix, and its NVFP4. Its other algorithms are refused by name.
"""

from collections.abc import Mapping
from typing import Any, Final

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.fp8 import Fp8
from minfer.effects.models.formats.keys import FormatKeys, check_keys, words
from minfer.effects.models.formats.nvfp4 import Nvfp4
from minfer.kernels.leaves import NVFP4

METHOD: Final = "modelopt"
# The file of its own, hf_quant_config.json, has the rest in an object.
OUTER_KEYS: Final = FormatKeys(
    read=words("quant_method quantization"), inert=words("producer")
)
KEYS: Final = FormatKeys(
    read=words("quant_method quant_algo group_size"),
    inert=words(
        "producer exclude_modules ignore config_groups kv_cache_scheme",
        "kv_cache_quant_algo",  # the KV cache is as the settings say
    ),
)


NVFP4_WEIGHTS: Final = Nvfp4(METHOD, ".weight", ".weight_scale_2", divides=False)


def read_modelopt(reader: ConfigReader, quant_config: Mapping[str, Any]) -> Fp8 | Nvfp4:
    """Returns the format of a config with quant_method "modelopt". Raises
    `UnsupportedModelError`.
    """
    inner = quant_config.get("quantization")
    if isinstance(inner, dict):
        check_keys(reader, METHOD, quant_config, OUTER_KEYS)
        quant_config = inner
    check_keys(reader, METHOD, quant_config, KEYS)
    label = f"quantization_config ({METHOD})"
    match quant_config.get("quant_algo"):
        case "FP8":
            return Fp8(blocks=False)
        case "NVFP4" | "W4A16_NVFP4":
            if (size := quant_config.get("group_size")) not in (None, NVFP4.group):
                fault = f"{label}: group_size {size!r} is not supported"
                raise reader.refusal(f"{fault}; {NVFP4.group} is")
            return NVFP4_WEIGHTS
        case algorithm:
            fault = f"{label}: quant_algo {algorithm!r} is not supported"
            raise reader.refusal(f"{fault}; 'FP8', 'NVFP4' and 'W4A16_NVFP4' are")
