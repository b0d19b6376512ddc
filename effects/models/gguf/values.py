"""Reads the values of tensors of a GGUF file, as the Hugging Face checkpoint has them:
dequantized, and in its order.
"""

from typing import Final

import torch
from torch import Tensor

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.gguf.container import GgufFile, StoredTensor
from minfer.effects.models.gguf.dequantize import dequantized, split_q4_0
from minfer.effects.models.gguf.hf_tensors import HfTensor

MAX_PIECE_NUMBERS: Final = 1 << 24  # that are dequantized at once
_FLOATS: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_values(file: GgufFile, tensor: HfTensor, dtype: str, device: str) -> Tensor:
    """Returns a tensor as the checkpoint has it. A quantized one is dequantized to
    `dtype`, on `device`; others keep their type.
    """
    blocks = _blocks(file, tensor.stored, tensor.expert)
    if tensor.form != "whole":
        numbers, scales = split_q4_0(blocks.to(device))
        values = numbers if tensor.form == "numbers" else scales
    elif (kind := _FLOATS.get(tensor.stored.type.name)) is not None:
        values = blocks.view(kind)
    else:
        values = _dequantize_in_pieces(tensor.stored, blocks, torch_dtype(dtype), device)
    values = values.reshape(tensor.shape)
    if tensor.heads:
        # Neighbouring dimensions [heads, pairs, 2] to halves [heads, 2, pairs].
        halves = values.reshape(tensor.heads, -1, 2, *values.shape[1:])
        values = halves.transpose(1, 2).reshape(values.shape)
    return values.float() - 1 if tensor.less_one else values


def _blocks(file: GgufFile, stored: StoredTensor, expert: int | None) -> Tensor:
    """Returns the bytes of a tensor, or of one expert's part of it [blocks, bytes of a
    block]: a view of the mapped file.
    """
    start, size = stored.start, stored.size
    if expert is not None:
        size //= stored.shape[0]
        start += expert * size
    flat = torch.frombuffer(file.data, dtype=torch.uint8, count=size, offset=start)
    return flat.view(-1, stored.type.size)


def _dequantize_in_pieces(
    stored: StoredTensor, blocks: Tensor, dtype: torch.dtype, device: str
) -> Tensor:
    """Dequantizes blocks in pieces: at most `MAX_PIECE_NUMBERS` are in float32."""
    name, block_numbers = stored.type.name, stored.type.elements
    values = torch.empty((len(blocks), block_numbers), dtype=dtype, device=device)
    rows = max(1, MAX_PIECE_NUMBERS // block_numbers)
    for piece, target in zip(
        torch.split(blocks, rows), torch.split(values, rows), strict=True
    ):
        target.copy_(dequantized(name, piece.to(device)))
    return values
