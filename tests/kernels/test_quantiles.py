"""Numbers that quantiles are found with; test_sample.py has what comes of them."""

import torch

from minfer.kernels import quantiles


def test_numbers_are_those_of_float32() -> None:
    infinity = torch.tensor(torch.inf).view(torch.int32)
    assert quantiles.INFINITY_BITS.value == int(infinity)
    assert 2**quantiles.BITS_A_PASS.value == quantiles.DIGITS.value
