"""Reads the tensors of a GGUF file as those of an open safetensors file."""

from typing import TYPE_CHECKING, Any

from minfer.effects.models.gguf.container import GgufFile
from minfer.effects.models.gguf.shown import ShownTensor, shown_tensors

if TYPE_CHECKING:
    from torch import Tensor


class GgufTensors:
    """The tensors of a file, with the methods of an open safetensors file."""

    def __init__(self, file: GgufFile, dtype: str = "float32", device: str = "cpu"):
        """Matrices are dequantized to `dtype`, on `device`."""
        self._file, self._dtype, self._device = file, dtype, device
        self._shown = shown_tensors(file)

    def keys(self) -> list[str]:
        """Returns the names of all tensors."""
        return [*self._shown]

    def get_slice(self, name: str) -> ShownTensor:
        """Returns what tells a tensor's shape and type."""
        return self._shown[name]

    def get_tensor(self, name: str) -> "Tensor":
        """Returns a tensor."""
        from minfer.effects.models.gguf.values import read_values

        return read_values(self._file, self._shown[name], self._dtype, self._device)


def opened(file: GgufFile, dtype: str, device: str) -> Any:
    """Returns the tensors of a file in the place of an open safetensors file, which has
    no type.
    """
    return GgufTensors(file, dtype, device)
