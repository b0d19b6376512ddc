"""The values of --quantization that are levels."""

from typing import Final

_NAMES: Final = (
    "fp8",
    "fp8_block",
    "int8",
    "int4",
    "int4:32",
    "int4:64",
    "int4:128",
    "mxfp4",
)


def level_names() -> tuple[str, ...]:
    """Returns the names of all levels that --quantization takes."""
    return _NAMES
