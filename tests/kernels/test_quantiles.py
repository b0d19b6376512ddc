"""Numbers that quantiles are found with; test_sample.py has what comes of them."""

import math

import torch

from minfer.kernels import quantiles, sample


def test_numbers_are_those_of_the_reference() -> None:
    assert quantiles.GREEDY_BELOW.value == sample.GREEDY_BELOW
    infinity = torch.tensor(torch.inf).view(torch.int32)
    assert quantiles.INFINITY_BITS.value == int(infinity)
    assert 2**quantiles.BITS_A_PASS.value == quantiles.CHOICES.value


def test_masses_and_moments_of_all_tokens_fit() -> None:
    unit = int(quantiles.MASS_UNITS.value)
    assert sample.MOST_LOGITS * unit <= 2**63
    deepest = max(x / 8 * math.exp(-x / 8) for x in range(1000))
    assert sample.MOST_LOGITS * unit * deepest < 2**62
