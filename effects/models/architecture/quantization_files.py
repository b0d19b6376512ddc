"""Files beside a config.json that say how its checkpoint is quantized.

Older tools wrote them instead of the config's `quantization_config`, which has priority.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from minfer.effects.models.json_files import read_optional

KEY: Final = "quantization_config"
FILE: Final = "_quantization_file"  # beside it: the name of the file that it is from
# By the file's name, the `quant_method` of a file that does not name one: AutoGPTQ's,
# AutoAWQ's, and that of NVIDIA's Model Optimizer.
METHODS: Final[Mapping[str, str]] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the contents of a folder's config.json, with the quantization that a file
    beside it describes. Raises `CorruptFileError`.
    """
    if config.get(KEY) is not None:
        return config
    for name, method in METHODS.items():
        if quantization := read_optional(folder / name):
            return {**config, KEY: {"quant_method": method, **quantization}, FILE: name}
    return config


def described_in(config: Mapping[str, Any], source: str) -> str:
    """Returns the file that says how a checkpoint is quantized; `source` is its
    config.json.
    """
    name = str(config.get(FILE))
    return str(Path(source).with_name(name)) if name in METHODS else source
