"""The types that numbers are kept in, by their names in a config.

torch is imported only where its own type is asked for: memory plans need the sizes alone.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from minfer.effects.models.config_reader import UnsupportedModelError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises `UnsupportedModelError` for a dtype that minfer does
    not run.
    """
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise UnsupportedModelError(
            f"dtype {dtype!r} is not supported; choose one of {known}"
        )
    return DTYPE_BYTES[dtype]


def torch_dtype(name: str) -> "torch.dtype":
    """The torch dtype of that name. Raises `UnsupportedModelError` for one that does not
    run.
    """
    import torch

    dtype_bytes(name)
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]
