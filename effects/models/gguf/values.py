"""Reads the values of tensors of a GGUF file, as the Hugging Face checkpoint has them:
dequantized, and in its order.
"""

from typing import Final

import torch
from torch import Tensor

from minfer.effects.models.dtypes import torch_dtype
from minfer.effects.models.gguf.block_types import MXFP4
from minfer.effects.models.gguf.container import StoredTensor
from minfer.effects.models.gguf.dequantize import (
    dequantized,
    split_mxfp4,
    split_q4_0,
)
from minfer.effects.models.gguf.hf_tensors import HfTensor

MAX_PIECE_NUMBERS: Final = 1 << 24  # that are dequantized at once
_FLOATS: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def read_values(tensor: HfTensor, dtype: str, device: str) -> Tensor:
    """Returns a tensor as the checkpoint has it. A quantized one is dequantized to
    `dtype`, on `device`; others keep their type.
    """
    if tensor.values is not None:
        return _expansion(tensor.stored, tensor.values, dtype, device)
    blocks = _blocks(tensor)
    if tensor.form != "whole":
        split = split_mxfp4 if tensor.stored.type is MXFP4 else split_q4_0
        numbers, scales = split(blocks.to(device))
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


def _expansion(
    keys: StoredTensor, values: StoredTensor, dtype: str, device: str
) -> Tensor:
    """Returns DeepSeek's expansion of latents [heads * (key_dim + value_dim), rank], of
    keys [heads, rank, key_dim] and values [heads, value_dim, rank].
    """
    of_keys, of_values = (
        read_values(HfTensor(stored, stored.shape), dtype, device)
        for stored in (keys, values)
    )
    return torch.cat((of_keys.transpose(1, 2), of_values), 1).flatten(0, 1)


def _blocks(tensor: HfTensor) -> Tensor:
    """Returns the bytes of a stored tensor, or of one part of it [blocks, bytes of a
    block]: a view of the mapped file.
    """
    stored = tensor.stored
    size = stored.size // tensor.parts
    start = stored.start + tensor.part * size
    flat = torch.frombuffer(stored.data, dtype=torch.uint8, count=size, offset=start)
    return flat.view(-1, stored.type.size)


def _dequantize_in_pieces(
    stored: StoredTensor, blocks: Tensor, dtype: torch.dtype, device: str
) -> Tensor:
    """Dequantizes blocks in pieces: at most `MAX_PIECE_NUMBERS` are in float32."""
    kind, block_numbers = stored.type, stored.type.elements
    values = torch.empty((len(blocks), block_numbers), dtype=dtype, device=device)
    rows = max(1, MAX_PIECE_NUMBERS // block_numbers)
    for piece, target in zip(
        torch.split(blocks, rows), torch.split(values, rows), strict=True
    ):
        target.copy_(dequantized(kind, piece.to(device)))
    return values
