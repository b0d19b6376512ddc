"""Dequantizes the block types of GGUF files.

A block of the older types (`Q4_0` to `Q8_0`) has 32 numbers and one scale; of `Q4_1` and
`Q5_1` also a minimum, which is added. A block of the K types has 256 numbers in 8 or 16
groups. Each group has a scale, and in Q4_K and Q5_K a minimum, of 6 or 8 bits; the block
has float16 scales of these. Operations and their order are those of llama.cpp's
reference, in float32, so that results are bit-identical. Types of fewer bits, and those
with tables of numbers, are dequantized by the `gguf` package.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from minfer.effects.models.gguf.block_types import BlockType
from minfer.kernels.leaves import MXFP4, Linear
from minfer.kernels.quantized import dequantize

_FLOAT16_BYTES: Final = 2  # bytes of a float16
_HIGH_BITS_BYTES: Final = 4  # bytes of the fifth bits of 32 numbers
_K_SCALES_BYTES: Final = 12  # bytes of the scales and minimums of 8 groups


def dequantized(kind: BlockType, blocks: Tensor) -> Tensor:
    """Dequantizes blocks of a type: uint8 [blocks, bytes of a block] to float32 [blocks,
    numbers of a block].
    """
    if kind.by_package:
        return _by_package(kind.name, blocks)
    return _TYPES[kind.name](blocks).flatten(1)


def _by_package(name: str, blocks: Tensor) -> Tensor:
    """Dequantizes blocks with the `gguf` package, on the CPU."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    numbers = dequantize(blocks.cpu().numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(numbers).to(blocks.device)


def split_q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers of Q4_0 blocks, from 0 to 15, two in a byte with the earlier
    one in the low half [blocks, 16], and the scales [blocks] in float16.
    """
    return _paired(blocks[:, _FLOAT16_BYTES:]), _half(blocks, 0)


def split_mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers of MXFP4 blocks as `split_q4_0` does, and the exponents
    [blocks] in uint8.
    """
    return _paired(blocks[:, 1:]), blocks[:, 0]


def _paired(packed: Tensor) -> Tensor:
    """Brings 4-bit numbers, of 16 bytes the low halves first, into the order of inputs:
    two neighbours in a byte.
    """
    numbers = _nibbles(packed).flatten(1)
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def _half(blocks: Tensor, offset: int) -> Tensor:
    return blocks[:, offset : offset + _FLOAT16_BYTES].contiguous().view(torch.float16)


def _scale(blocks: Tensor, offset: int = 0) -> Tensor:
    """Returns the float16 at a byte of each block, in float32 [blocks, 1]."""
    return _half(blocks, offset).float()


def _nibbles(packed: Tensor, group: int = 16) -> Tensor:
    """Unpacks 4-bit numbers: of each `group` bytes the low halves, then the high ones.
    Returns [blocks, groups, 2, bytes of a group].
    """
    groups = packed.reshape(len(packed), -1, 1, group)
    return torch.cat([groups & 15, groups >> 4], dim=2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Returns the fifth bits of 32 numbers, each 0 or 16 [blocks, 32], from 4 bytes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, _FLOAT16_BYTES:]).flatten(1).to(torch.int8) - 8
    return _scale(blocks) * numbers.float()


def _q4_1(blocks: Tensor) -> Tensor:
    numbers = _nibbles(blocks[:, 2 * _FLOAT16_BYTES :]).flatten(1).float()
    return _scale(blocks) * numbers + _scale(blocks, _FLOAT16_BYTES)


def _q5_0(blocks: Tensor) -> Tensor:
    high, low = blocks[:, _FLOAT16_BYTES:].split_with_sizes([_HIGH_BITS_BYTES, 16], 1)
    numbers = _nibbles(low).flatten(1) | _fifth_bits(high)
    return _scale(blocks) * (numbers.to(torch.int8) - 16).float()


def _q5_1(blocks: Tensor) -> Tensor:
    high, low = blocks[:, 2 * _FLOAT16_BYTES :].split_with_sizes(
        [_HIGH_BITS_BYTES, 16], 1
    )
    numbers = _nibbles(low).flatten(1) | _fifth_bits(high)
    return _scale(blocks) * numbers.float() + _scale(blocks, _FLOAT16_BYTES)


def _mxfp4(blocks: Tensor) -> Tensor:
    numbers, exponents = split_mxfp4(blocks)
    scales = exponents[:, None]
    leaf = Linear(weight=numbers, scheme=MXFP4, scales=scales, parts=(len(numbers),))
    return dequantize(leaf)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, _FLOAT16_BYTES:].contiguous().view(torch.int8).float() * _scale(
        blocks
    )


def _k_groups(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and the minimums of 8 groups, each [blocks, 8, 1], from the
    first bytes of a block of Q4_K or Q5_K, which has 6 bits of each.
    """
    packed = blocks[:, 2 * _FLOAT16_BYTES : 2 * _FLOAT16_BYTES + _K_SCALES_BYTES]
    first, second, rest = packed.split_with_sizes([4, 4, 4], 1)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], dim=1)
    minimums = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], dim=1)
    scales = _scale(blocks) * scales.float()
    return scales[..., None], (_scale(blocks, _FLOAT16_BYTES) * minimums.float())[
        ..., None
    ]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_groups(blocks)
    packed = blocks[:, 2 * _FLOAT16_BYTES + _K_SCALES_BYTES :]
    numbers = _nibbles(packed, 32).reshape(len(blocks), 8, 32)
    return scales * numbers.float() - minimums


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_groups(blocks)
    high, packed = blocks[:, 2 * _FLOAT16_BYTES + _K_SCALES_BYTES :].split_with_sizes(
        [32, 128], 1
    )
    # Bit i of a byte belongs to group i.
    groups = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (high[:, None] >> groups & 1) << 4
    numbers = _nibbles(packed, 32).reshape(len(blocks), 8, 32) | fifth
    return scales * numbers.float() - minimums


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, _ = blocks.split_with_sizes([128, 64, 16, _FLOAT16_BYTES], 1)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    upper = (high.reshape(len(blocks), 2, 1, 32) >> shifts & 3) << 4
    numbers = _nibbles(low, 64).reshape(len(blocks), 2, 4, 32) | upper
    groups = (numbers.to(torch.int8) - 32).reshape(len(blocks), 16, 16)
    group_scales = _scale(blocks, 208) * scales.contiguous().view(torch.int8).float()
    return group_scales[..., None] * groups.float()


_TYPES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
