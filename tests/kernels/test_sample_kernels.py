"""The kernels' numbers; test_sample.py has what they draw."""

import torch

from minfer.kernels import sample_kernels


def test_numbers_are_those_of_the_reference() -> None:
    assert sample_kernels.LOWEST.value == torch.finfo(torch.float32).min
