"""Products of 4-bit matrices in groups on the CPU.

Theory. A product of few rows takes the time in which the matrix is read, and 4-bit
numbers are a quarter of bfloat16's bytes: torch's `_weight_int4pack_mm_for_cpu`
dequantizes in registers. It does so for each row anew, so from `MIN_DEQUANTIZED_ROWS`
rows on it is faster to dequantize the matrix, a piece of its outputs at a time, and
multiply with that.
So it is of any number of float32 rows, for which torch's product has no vector code.

torch packs numbers for the width of the processor's registers: in a block of outputs,
numbers of the same input stand together, those of the block's first half in the low
halves of bytes. The size of the block is found by packing a matrix. Where numbers are
elsewhere, torch's product multiplies any number of rows.
"""

from functools import cache
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from minfer.kernels.leaves import Linear
from minfer.kernels.plain import product_dtype

BLOCK_SIZES: Final = (64, 32, 16)
# From as many rows on dequantizing is faster, on an AMD EPYC with AVX2.
MIN_DEQUANTIZED_ROWS: Final = 96
MAX_DEQUANTIZED_NUMBERS: Final = 1 << 22  # numbers that are dequantized at once
ZERO_POINT: Final = 8
DESCRIPTION: Final = (
    f"torch's 4-bit product below {MIN_DEQUANTIZED_ROWS} rows of bfloat16; else "
    f"dequantized a piece at a time, then multiplied"
)


@frozen(eq=False)
class PackedInt4:
    """A matrix in torch's layout."""

    weight: Tensor  # [outputs, inputs / 2] uint8
    # [groups, outputs, 2]: a group's scale, and the value of the number `ZERO_POINT`.
    scales: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x @ weight.T + bias [rows, outputs]."""
        is_small_batch = len(x) < MIN_DEQUANTIZED_ROWS and x.dtype is torch.bfloat16
        block = 0 if is_small_batch else block_size()
        if block and len(self.weight) % block == 0:
            total = self._dequantized_product(x, block)
        else:
            group = x.shape[1] // len(self.scales)
            total = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.weight, group, self.scales
            )
        return total if bias is None else total.add_(bias)

    def _dequantized_product(self, x: Tensor, block: int) -> Tensor:
        """Returns x @ weight.T [rows, outputs], whose blocks have `block` outputs."""
        outputs, inputs = len(self.weight), x.shape[1]
        wide = x.to(product_dtype(x.dtype))
        total = x.new_empty(len(x), outputs // block, block)
        at_once = max(1, MAX_DEQUANTIZED_NUMBERS // (inputs * block))
        for first in range(0, outputs // block, at_once):
            piece = slice(first, first + at_once)
            matrix = self._dequantized(piece, block).to(wide.dtype)
            total[:, piece] = torch.matmul(wide, matrix).transpose(0, 1)
        return total.flatten(1)

    def _dequantized(self, blocks: slice, block: int) -> Tensor:
        """Returns some blocks of outputs [blocks, inputs, block] float32."""
        groups, half = len(self.scales), block // 2
        packed = self.weight.view(-1, 2 * self.weight.shape[1], half)[blocks]
        numbers = torch.empty(*packed.shape[:2], block)
        numbers[..., :half] = packed & 15
        numbers[..., half:] = packed >> 4
        by_block = self.scales.view(groups, -1, 1, block, 2)[:, blocks].float()
        step, middle = by_block.transpose(0, 1).unbind(-1)
        grouped = numbers.view(len(packed), groups, -1, block)
        torch.addcmul(middle - ZERO_POINT * step, grouped, step, out=grouped)
        return numbers


def pack(matrix: Linear) -> PackedInt4 | None:
    """Returns a leaf's matrix in torch's layout; None: torch has none for it."""
    scales, outputs = matrix.scaled, len(matrix.weight)
    dtype = str(scales.dtype).removeprefix("torch.")
    if not matrix.scheme.packs_on_cpu(outputs, matrix.inputs, dtype):
        return None
    numbers = torch.empty(outputs, matrix.inputs, dtype=torch.int32)
    numbers[:, ::2] = matrix.weight & 15
    numbers[:, 1::2] = matrix.weight >> 4
    step = scales.float()
    zeros = (
        torch.zeros_like(step)
        if matrix.zeros is None
        else ZERO_POINT - matrix.zeros.float()
    )
    scales_and_zeros = torch.stack((step, zeros * step), -1).transpose(0, 1)
    return PackedInt4(_packed(numbers), scales_and_zeros.to(scales.dtype).contiguous())


def _packed(numbers: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed


@cache
def block_size() -> int:
    """Returns the outputs of a block of torch's layout; 0: they stand otherwise."""
    random = torch.Generator().manual_seed(0)
    shape = (2 * max(BLOCK_SIZES), 64)
    numbers = torch.randint(0, 16, shape, generator=random, dtype=torch.int32)
    packed = _packed(numbers)
    for block in BLOCK_SIZES:
        halves = packed.view(-1, shape[1], block // 2)
        unpacked = torch.cat((halves & 15, halves >> 4), -1).transpose(1, 2)
        if torch.equal(unpacked.reshape(shape).int(), numbers):
            return block
    return 0
