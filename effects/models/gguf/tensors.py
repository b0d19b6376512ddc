"""Reads the tensors of a GGUF file through the interface of an open safetensors file."""

from typing import TYPE_CHECKING, Any

from minfer.effects.models.gguf.container import GgufFile
from minfer.effects.models.gguf.hf_tensors import HfTensor, hf_tensors

if TYPE_CHECKING:
    from torch import Tensor


class GgufTensors:
    """The tensors of a file by the methods of an open safetensors file."""

    def __init__(self, file: GgufFile, dtype: str = "float32", device: str = "cpu"):
        """Matrices are dequantized to `dtype`, on `device`."""
        self._dtype, self._device = dtype, device
        self._tensors = hf_tensors(file)

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return [*self._tensors]

    def get_slice(self, name: str) -> HfTensor:
        """Returns a tensor's description, which has its shape and type."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> "Tensor":
        """Returns a tensor."""
        from minfer.effects.models.gguf.values import read_values

        return read_values(self._tensors[name], self._dtype, self._device)


def open_gguf_tensors(file: GgufFile, dtype: str, device: str) -> Any:
    """Returns the tensors of a file, to use as an open safetensors file, which has no
    static type.
    """
    return GgufTensors(file, dtype, device)
