"""Blocks of each type, beside the `gguf` package's reference."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minfer.effects.models.gguf.block_types import TYPES
from minfer.effects.models.gguf.dequantize import (
    dequantized,
    split_mxfp4,
    split_q4_0,
)
from minfer.kernels.leaves import MXFP4, Linear, int4
from minfer.kernels.quantized import dequantize

BLOCKED = [number for number, kind in TYPES.items() if not kind.is_float]


@pytest.mark.parametrize("number", TYPES)
def test_sizes_are_those_of_the_format(number: int) -> None:
    kind = TYPES[number]
    assert Type(number).name == kind.name
    assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.elements, kind.size)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow)")  # of random scales
@pytest.mark.parametrize("number", BLOCKED)
def test_numbers_are_equal_bit_by_bit(number: int) -> None:
    kind = TYPES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (200, kind.size), dtype=np.uint8)
    expected = gguf.quants.dequantize(blocks, Type(number))
    numbers = dequantized(kind, torch.from_numpy(blocks)).numpy()
    assert numbers.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    assert nan.mean() < 0.5
    np.testing.assert_array_equal(np.isnan(numbers), nan)
    numbers, expected = (
        (values[~nan] + np.float32(0)).view(np.uint32)  # -0 is 0
        for values in (numbers, expected)
    )
    np.testing.assert_array_equal(numbers, expected)


def test_q4_0_is_kept_exactly() -> None:
    numbers = np.random.default_rng(0).standard_normal((6, 96), np.float32)
    stored = gguf.quants.quantize(numbers, Type.Q4_0)
    packed, scales = split_q4_0(torch.from_numpy(stored).view(-1, 18))
    leaf = Linear(
        weight=packed.reshape(6, 48),
        scheme=int4(32),
        scales=scales.reshape(6, 3).float(),
        parts=(6,),
    )
    expected = gguf.quants.dequantize(stored, Type.Q4_0)
    np.testing.assert_array_equal(dequantize(leaf).numpy(), expected)


def test_mxfp4_is_kept_exactly() -> None:
    numbers = np.random.default_rng(0).standard_normal((6, 96), np.float32)
    stored = gguf.quants.quantize(numbers, Type.MXFP4)
    packed, exponents = split_mxfp4(torch.from_numpy(stored).view(-1, 17))
    leaf = Linear(
        weight=packed.reshape(6, 48),
        scheme=MXFP4,
        scales=exponents.reshape(6, 3),
        parts=(6,),
    )
    expected = gguf.quants.dequantize(stored, Type.MXFP4)
    np.testing.assert_array_equal(dequantize(leaf).numpy(), expected)
