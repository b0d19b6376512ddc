"""How published checkpoints store quantized matrices, one module a format.

A `WeightFormat` says which tensors a matrix is in, and how each is brought into the form
that minfer's kernels read (kernels/leaves.py): rows of outputs, scales by output.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from minfer.effects.models.config_reader import ConfigReader
from minfer.effects.models.formats.awq import read_awq
from minfer.effects.models.formats.compressed_tensors import read_compressed
from minfer.effects.models.formats.fp8 import read_fp8
from minfer.effects.models.formats.gguf import METHOD, read_gguf_format
from minfer.effects.models.formats.gptq import read_gptq
from minfer.effects.models.formats.modelopt import METHOD as MODELOPT
from minfer.effects.models.formats.modelopt import read_modelopt
from minfer.effects.models.formats.mxfp4 import read_mxfp4
from minfer.effects.models.formats.protocol import WeightFormat as WeightFormat

# By `quant_method`.
READERS: Final[
    Mapping[str, Callable[[ConfigReader, Mapping[str, Any]], WeightFormat]]
] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
    METHOD: read_gguf_format,
    "gptq": read_gptq,
    MODELOPT: read_modelopt,
    "mxfp4": read_mxfp4,
}


def format_of(reader: ConfigReader) -> WeightFormat | None:
    """Returns the format that a config's `quantization_config` names; None: there is
    none. Raises `UnsupportedModelError` and `ModelConfigError`.
    """
    quant_config = reader.config.get("quantization_config")
    if quant_config is None:
        return None
    is_object = isinstance(quant_config, dict)
    method = quant_config.get("quant_method") if is_object else quant_config
    read_format = READERS.get(str(method))
    if read_format is None or not is_object:
        supported = ", ".join(READERS)
        raise reader.refusal(
            f"quantization_config with quant_method {method!r} is not supported; "
            f"{supported} are; or use the unquantized checkpoint, with --quantization"
        )
    return read_format(reader, quant_config)
