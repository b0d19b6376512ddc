"""Values of tensors of a GGUF file: read, dequantized, and in a checkpoint's order."""

from typing import Final

import torch
from torch import Tensor

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.gguf.container import GgufFile, StoredTensor
from minfer.effects.models.gguf.dequantize import dequantized, split_q4_0
from minfer.effects.models.gguf.shown import ShownTensor

PIECE: Final = 1 << 24  # numbers that are dequantized at once
_FLOATS: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_values(file: GgufFile, shown: ShownTensor, dtype: str, device: str) -> Tensor:
    """Returns a tensor as the checkpoint has it; where it is dequantized, in `dtype`, on
    `device`.
    """
    blocks = _blocks(file, shown.stored, shown.expert)
    if shown.form != "whole":
        numbers, scales = split_q4_0(blocks.to(device))
        found = numbers if shown.form == "numbers" else scales
    elif (kind := _FLOATS.get(shown.stored.type.name)) is not None:
        found = blocks.view(kind)
    else:
        found = _pieces(shown.stored, blocks, torch_dtype(dtype), device)
    found = found.reshape(shown.shape)
    if shown.heads:
        # [heads, dimension of a half, half] to halves one behind the other.
        halves = found.reshape(shown.heads, -1, 2, *found.shape[1:])
        found = halves.transpose(1, 2).reshape(found.shape)
    return found.float() - 1 if shown.less_one else found


def _blocks(file: GgufFile, stored: StoredTensor, expert: int | None) -> Tensor:
    """Returns the bytes [blocks, bytes of a block] of a tensor, or of an expert of it; a
    view of the file.
    """
    start, size = stored.start, stored.size
    if expert is not None:
        size //= stored.shape[0]
        start += expert * size
    flat = torch.frombuffer(file.data, dtype=torch.uint8, count=size, offset=start)
    return flat.view(-1, stored.type.size)


def _pieces(
    stored: StoredTensor, blocks: Tensor, dtype: torch.dtype, device: str
) -> Tensor:
    """Returns dequantized numbers, of which few at a time are in float32."""
    name, each = stored.type.name, stored.type.elements
    found = torch.empty((len(blocks), each), dtype=dtype, device=device)
    rows = max(1, PIECE // each)
    for some, target in zip(
        torch.split(blocks, rows), torch.split(found, rows), strict=True
    ):
        target.copy_(dequantized(name, some.to(device)))
    return found
