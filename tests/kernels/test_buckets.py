"""Few of a row's tokens are left to sort out; test_sample.py has what comes of them."""

import math
from typing import Any

import pytest
import torch

from minfer.kernels import buckets, sample_kernels
from minfer.kernels import sample as kernels
from minfer.kernels.sample import Sizes
from minfer.request import SamplingParams

from .conftest import CUDA
from .test_sample import tensors

VOCAB = 20_000
MOST = VOCAB // 50  # tokens that may be left of a row, even where nearly all are kept


class Seen:
    """A kernel whose last arguments are kept."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.last: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            self.last = arguments
            self.kernel[grid](**arguments)

        return launch


@pytest.mark.parametrize(
    "how",
    [
        {"top_p": 0.9},
        {"top_p": 0.99},
        {"top_p": 0.9, "min_p": 1e-3},
        {"min_p": 0.01},
        {"top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
def test_few_tokens_are_left(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(chunk=2048, group=64, span=2048, tile=512, samples=2048, few=200)
    monkeypatch.setattr(kernels, "SIZES", sizes)
    finish = Seen(sample_kernels.finish)
    monkeypatch.setattr(kernels, "finish", finish)
    spreads = torch.tensor([[0.02], [3.0], [6.0]])
    generator = torch.Generator().manual_seed(2)
    logits = spreads * torch.randn(len(spreads), VOCAB, generator=generator)
    device = "cuda" if CUDA else "cpu"
    row = SamplingParams(**how), 1, 0, 5
    arguments = tensors([row] * len(spreads), device)
    tokens, _ = kernels.sample(logits.to(device), *arguments)
    expected, _ = kernels.reference(logits.to(device), *arguments)
    assert torch.equal(tokens, expected)
    assert max(finish.last["counts"].tolist()) < MOST


def test_numbers_are_those_of_the_reference() -> None:
    assert buckets.GREEDY_BELOW.value == kernels.GREEDY_BELOW


def test_numbers_fit_each_other() -> None:
    assert buckets.PARTS.value + 2 == buckets.BUCKETS.value
    assert len(buckets.Bounds._fields) <= buckets.FACTS.value
    assert math.exp(-buckets.DEEP.value) > torch.finfo(torch.float32).tiny


def test_masses_and_moments_of_all_tokens_fit() -> None:
    unit = int(buckets.MASS_UNITS.value)
    assert kernels.MOST_LOGITS * unit <= 2**63
    deepest = max(x / 8 * math.exp(-x / 8) for x in range(1000))
    assert kernels.MOST_LOGITS * unit * deepest < 2**62
