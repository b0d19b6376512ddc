"""Products of 4-bit matrices in groups on the CPU.

Theory. A product of few rows takes the time in which the matrix is read, and 4-bit
numbers are a quarter of bfloat16's bytes: torch's `_weight_int4pack_mm_for_cpu`
dequantizes in registers. It does so for each row anew, so from `MANY` rows on it is
faster to dequantize the matrix, a piece of its outputs at a time, and multiply with that.
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

BLOCKS: Final = (64, 32, 16)
MANY: Final = 96  # rows from which dequantizing is faster, on an AMD EPYC with AVX2
PIECE: Final = 1 << 22  # numbers that are dequantized at once
MIDDLE: Final = 8
DESCRIPTION: Final = (
    f"torch's 4-bit product below {MANY} rows of bfloat16; else dequantized a piece at a "
    f"time, then multiplied"
)


@frozen(eq=False)
class PackedInt4:
    """A matrix in torch's layout."""

    weight: Tensor  # [outputs, inputs / 2] uint8
    # [groups, outputs, 2]: a group's scale, and the value of the number `MIDDLE`.
    scales: Tensor

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns x @ weight.T + bias [rows, outputs]."""
        few = len(x) < MANY and x.dtype is torch.bfloat16
        block = 0 if few else block_size()
        if block and len(self.weight) % block == 0:
            found = self._dequantized_product(x, block)
        else:
            group = x.shape[1] // len(self.scales)
            found = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.weight, group, self.scales
            )
        return found if bias is None else found.add_(bias)

    def _dequantized_product(self, x: Tensor, block: int) -> Tensor:
        """Returns x @ weight.T [rows, outputs], whose blocks have `block` outputs."""
        outputs, inputs = len(self.weight), x.shape[1]
        wide = x.to(product_dtype(x.dtype))
        found = x.new_empty(len(x), outputs // block, block)
        at_once = max(1, PIECE // (inputs * block))
        for first in range(0, outputs // block, at_once):
            piece = slice(first, first + at_once)
            matrix = self._dequantized(piece, block).to(wide.dtype)
            found[:, piece] = torch.matmul(wide, matrix).transpose(0, 1)
        return found.flatten(1)

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
        torch.addcmul(middle - MIDDLE * step, grouped, step, out=grouped)
        return numbers


def pack(by: Linear) -> PackedInt4 | None:
    """Returns a leaf's matrix in torch's layout; None: torch has none for it."""
    scales, outputs = by.scaled, len(by.weight)
    dtype = str(scales.dtype).removeprefix("torch.")
    if not by.scheme.packs_on_cpu(outputs, by.inputs, dtype):
        return None
    numbers = torch.empty(outputs, by.inputs, dtype=torch.int32)
    numbers[:, ::2] = by.weight & 15
    numbers[:, 1::2] = by.weight >> 4
    step = scales.float()
    zeros = torch.zeros_like(step) if by.zeros is None else MIDDLE - by.zeros.float()
    both = torch.stack((step, zeros * step), -1).transpose(0, 1)
    return PackedInt4(_packed(numbers), both.to(scales.dtype).contiguous())


def _packed(numbers: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return found


@cache
def block_size() -> int:
    """Returns the outputs of a block of torch's layout; 0: they stand otherwise."""
    random = torch.Generator().manual_seed(0)
    shape = (2 * max(BLOCKS), 64)
    numbers = torch.randint(0, 16, shape, generator=random, dtype=torch.int32)
    packed = _packed(numbers)
    for block in BLOCKS:
        halves = packed.view(-1, shape[1], block // 2)
        found = torch.cat((halves & 15, halves >> 4), -1).transpose(1, 2)
        if torch.equal(found.reshape(shape).int(), numbers):
            return block
    return 0
