"""Products of many tokens with matrices of FP8 in blocks, by cuBLASLt.

Theory. A scale of 128 x 128 numbers of a matrix and one of 128 numbers of a row: within a
block, the tensor cores sum products of FP8; each sum is multiplied with both scales and
added in float32 (DeepSeek-AI 2024). cuBLASLt does so on Hopper, from CUDA 12.9 on. It
takes the scales of a matrix with the blocks of an output one beside the other, padded to
a multiple of 4, and those of rows with the rows of a group beside each other, whose
number is a multiple of 4 (the library) and of 16 (so that one kernel serves all that
write them).

A leaf has a scale for each output, so that matrices can be fused, and their outputs
ordered, wherever blocks begin. The library multiplies it if its first 128 outputs have
one scale for each group, so the next 128, and so on: its scales tell, once it is loaded.
"""

import re
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minfer.kernels.eight_bits import FP8
from minfer.kernels.leaves import FP8_BLOCKS, Activation, Linear, Norm
from minfer.kernels.quantized_kernels import round_groups
from minfer.kernels.target import HOPPER, capability

BLOCK: Final = FP8_BLOCKS.group  # inputs, and outputs
GROUPS: Final = 4  # divides the scales of an output of the library
ROWS: Final = 16  # divides the rows, and the outputs
CUDA_VERSION: Final = (12, 9)  # the first with such a product
DTYPE: Final = torch.bfloat16  # of activations; others were not measured


def scales_of_blocks(matrix: Linear) -> Tensor | None:
    """Returns the scales of a leaf's blocks, as `Linear.blocks`; None if its outputs are
    not of whole blocks, or if there is no product of such a leaf.
    """
    if matrix.scheme != FP8_BLOCKS or matrix.weight.dim() != 2:
        return None
    outputs, inputs = matrix.weight.shape
    if inputs % BLOCK or outputs % ROWS or not _has_product(matrix.weight.device):
        return None
    scales = matrix.scaled
    blocks = scales[::BLOCK]
    if not torch.equal(blocks.repeat_interleave(BLOCK, 0)[:outputs], scales):
        return None
    return F.pad(blocks, (0, -blocks.shape[1] % GROUPS)).contiguous()


def _has_product(device: torch.device) -> bool:
    """Whether cuBLASLt multiplies blocks on this device."""
    version = re.match(r"(\d+)\.(\d+)", torch.version.cuda or "")
    if version is None or capability(device) != HOPPER:
        return False
    return (int(version[1]), int(version[2])) >= CUDA_VERSION


def takes(x: Tensor, matrix: Linear) -> bool:
    """Whether the library multiplies rows [tokens, inputs] with a leaf."""
    # A leaf may have been told not to round activations since it was loaded.
    rounds = matrix.blocks is not None and matrix.scheme.activations == "groups"
    return rounds and x.dtype is DTYPE and len(x) > 0


def rounded(
    x: Tensor, norm: Norm | None = None, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """Returns rows in FP8, and their scales, as `product` takes them: more than x has,
    the last of which may be anything; else as `round_groups`.
    """
    rows = -(-len(x) // ROWS) * ROWS
    return round_groups(x, FP8, BLOCK, norm, activation, rows=rows)


def product(numbers: Tensor, scales: Tensor, matrix: Linear, blocks: Tensor) -> Tensor:
    """Returns the product [rows, outputs] of `rounded` rows [rows, inputs] with a leaf,
    whose `Linear.blocks` are `blocks`, plus its bias.
    """
    kinds = F.ScalingType
    return F.scaled_mm(
        numbers,
        matrix.weight.t(),
        scales,
        kinds.BlockWise1x128,
        blocks.t(),
        kinds.BlockWise128x128,
        bias=matrix.bias,
        output_dtype=DTYPE,
    )
