"""Dtypes by their names in a config.

torch is imported only for its own dtypes: memory plans need only the sizes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from minfer.effects.models.config_reader import UnsupportedModelError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a KV cache alone.
FP8: Final = "float8_e4m3fn"
INT8: Final = "int8"
EIGHT_BITS: Final = (FP8, INT8)


def dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element. Raises `UnsupportedModelError` for a dtype that
    minfer does not support.
    """
    if dtype not in DTYPE_BYTES:
        supported = ", ".join(DTYPE_BYTES)
        raise UnsupportedModelError(
            f"dtype {dtype!r} is not supported; choose one of {supported}"
        )
    return DTYPE_BYTES[dtype]


def kv_dtype_bytes(dtype: str) -> int:
    """Returns the bytes of one element of a KV cache; raises as `dtype_bytes`."""
    return 1 if dtype in EIGHT_BITS else dtype_bytes(dtype)


def torch_kv_dtype(name: str) -> "torch.dtype":
    """Returns the torch dtype of a KV cache; raises as `torch_dtype`."""
    import torch

    dtypes_8bit = {FP8: torch.float8_e4m3fn, INT8: torch.int8}
    return dtypes_8bit[name] if name in dtypes_8bit else torch_dtype(name)


def torch_dtype(name: str) -> "torch.dtype":
    """Returns the torch dtype of that name. Raises `UnsupportedModelError` for an
    unsupported one.
    """
    import torch

    dtype_bytes(name)
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]
