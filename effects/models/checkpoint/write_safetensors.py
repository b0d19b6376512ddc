"""Writes safetensors files, one tensor at a time.

A file begins with a header that has the sizes of all tensors. So the sizes are given
first; each tensor is then written to its place, and only one need be in memory.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT: Final = 8  # bytes: the header ends at a multiple
LENGTH_BYTES: Final = 8  # of the header's length, with which a file begins
# Names of types in safetensors, by torch's names.
TYPES: Final = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
TORCH_NAMES: Final = {name: torch for torch, name in TYPES.items()}


@frozen
class TensorSize:
    """The name, type and size of a tensor in a file."""

    name: str
    type: str  # its name in safetensors
    shape: tuple[int, ...]
    element: int  # bytes of an element
    bytes: int


def size_of(name: str, tensor: "Tensor") -> TensorSize:
    """Returns the size of a tensor, which may be without data."""
    kind = TYPES[str(tensor.dtype).removeprefix("torch.")]
    shape = tuple(tensor.shape)
    return TensorSize(name, kind, shape, tensor.element_size(), tensor.nbytes)


def write_file(
    path: Path,
    sizes: Sequence[TensorSize],
    tensors: "Iterable[tuple[str, Tensor]]",
    written: Callable[[int], object],
) -> None:
    """Write a file of tensors of these sizes, which `tensors` yields in any order with
    their names; `written` is called with the bytes of each. Raises OSError, and
    ValueError for a tensor of another size, or a missing one.
    """
    # The widest elements first, so that each tensor begins at a multiple of its element.
    order = sorted(sizes, key=lambda size: -size.element)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = dict[str, tuple[TensorSize, int]](), 0
    for size in order:
        header[size.name] = {
            "dtype": size.type,
            "shape": size.shape,
            "data_offsets": [end, end + size.bytes],
        }
        places[size.name] = (size, end)
        end += size.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    base = LENGTH_BYTES + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(base + end)
        for name, tensor in tensors:
            size, start = places.pop(name)
            if (actual_size := size_of(name, tensor)) != size:
                raise ValueError(f"{path}: tensor {name} is {actual_size}, not {size}")
            file.seek(base + start)
            file.write(_bytes(tensor))
            written(size.bytes)
    if places:
        raise ValueError(f"{path}: tensors {', '.join(places)} are missing")


def _bytes(tensor: "Tensor") -> memoryview:
    import torch

    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)  # the type of `raw` does not declare the buffer interface
