"""Few of a row's tokens are left to sort out; test_sample.py has what comes of them."""

import math
from itertools import cycle
from typing import Any

import pytest
import torch

from minfer.kernels import bounds, sample_kernels, sample_launches, sample_reference
from minfer.kernels import sample as kernels
from minfer.kernels.sample_launches import ProgramSizes
from minfer.records.request import SamplingParams
from tests.circles import claimed

from .conftest import CUDA
from .test_sample import check_edges, tensors

# Infinities are meant: numpy, which is the interpreter, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")
DEVICE = "cuda" if CUDA else "cpu"
VOCAB = 20_000
MAX_LISTED_TOKENS = (
    VOCAB // 10
)  # tokens that may be listed of a row, even where nearly all are kept
SIZES = ProgramSizes(
    chunk=2048,
    group=64,
    span=2048,
    block=1024,
    tile=128,
    samples=2048,
    waits=24,
    max_unguessed=200,
)


class RecordedKernel:
    """A kernel whose last arguments are kept."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.last: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            self.last = arguments
            self.kernel[grid](**arguments)

        return launch


@pytest.mark.long
@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.9},
        {"top_p": 0.99},
        {"top_p": 0.9, "min_p": 1e-3},
        {"min_p": 0.01},
        {"top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_few_tokens_are_left(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SIZES", SIZES)
    finish = RecordedKernel(sample_kernels.finish)
    monkeypatch.setattr(sample_launches, "finish", finish)
    spreads = torch.tensor([[0.02], [3.0], [6.0]])
    generator = torch.Generator().manual_seed(2)
    logits = spreads * torch.randn(len(spreads), VOCAB, generator=generator)
    row = SamplingParams(**filters), 1, 0, 5
    arguments = tensors([row] * len(spreads), DEVICE)
    tokens, _ = kernels.sample(logits.to(DEVICE), *arguments)
    expected, _ = kernels.reference(logits.to(DEVICE), *arguments)
    assert torch.equal(tokens, expected)
    assert max(finish.last["counts"].tolist()) < MAX_LISTED_TOKENS


HOW = [{"top_p": 0.6}, {"top_p": 0.9, "min_p": 1e-3}, {"top_k": 900, "top_p": 0.9}]


@pytest.mark.long
@pytest.mark.parametrize("filters", HOW, ids=str)
def test_the_edge_is_where_it_was_guessed(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES._replace(
        chunk=512, span=512, block=256, tile=64, samples=1024, max_unguessed=20
    )
    monkeypatch.setattr(kernels, "SIZES", sizes)
    finish = RecordedKernel(sample_kernels.finish)
    monkeypatch.setattr(sample_launches, "finish", finish)
    line = 0.5 * torch.randn(5000, generator=torch.Generator().manual_seed(4))
    check_edges(line, [SamplingParams(**filters)], DEVICE)
    limits, lowered = finish.last["bounds"][:2, (3, 5)].T
    assert lowered.tolist() == [1, 1]
    assert limits.max() < 5


@pytest.mark.long
@pytest.mark.parametrize(
    ("filters", "off"),
    [
        *zip(HOW, cycle([-1.0, 1.0])),
        *claimed(zip(HOW, cycle([1.0, -1.0]))),
    ],
    ids=str,
)
def test_a_wrong_guess_changes_no_result(
    filters: dict[str, Any], off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are looked at have other logits than all others."""
    sizes = SIZES._replace(chunk=512, span=512, samples=512, max_unguessed=20)
    monkeypatch.setattr(kernels, "SIZES", sizes)
    line = 0.1 * torch.randn(4096, generator=torch.Generator().manual_seed(4))
    line[::8] += off
    check_edges(line, [SamplingParams(**filters)], DEVICE)


@pytest.mark.long
@pytest.mark.parametrize("waits", [24, 0.01])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"min_p": 0.5}], ids=str)
def test_only_listed_tokens_win(
    filters: dict[str, Any], waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few of those that are kept for sure are listed, or none of them."""
    sizes = SIZES._replace(
        chunk=512, span=512, samples=512, max_unguessed=20, waits=waits
    )
    monkeypatch.setattr(kernels, "SIZES", sizes)
    finish = RecordedKernel(sample_kernels.finish)
    monkeypatch.setattr(sample_launches, "finish", finish)
    logits = 0.1 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(4))
    rows = [(SamplingParams(**filters), seed, 0, 5) for seed in range(4)]
    arguments = tensors(rows, DEVICE)
    tokens, _ = kernels.sample(logits.to(DEVICE), *arguments)
    assert torch.equal(tokens, kernels.reference(logits.to(DEVICE), *arguments)[0])
    lists = finish.last["lists"].cpu(), finish.last["counts"].tolist()
    listed = [t in line[:n] for t, line, n in zip(tokens.tolist(), *lists, strict=True)]
    assert all(listed) == (waits > 1)


def test_numbers_are_those_of_the_reference() -> None:
    assert bounds.GREEDY_BELOW.value == sample_reference.GREEDY_BELOW


def test_numbers_fit_each_other() -> None:
    assert len(bounds.DepthBounds._fields) <= bounds.BOUND_WORDS.value
    assert math.exp(-bounds.MAX_NORMAL_DEPTH.value) > torch.finfo(torch.float32).tiny


def test_masses_and_moments_of_all_tokens_fit() -> None:
    unit = int(bounds.MASS_UNITS.value)
    assert kernels.MAX_LOGITS * unit <= 2**63
    deepest = max(x / 8 * math.exp(-x / 8) for x in range(1000))
    assert kernels.MAX_LOGITS * unit * deepest < 2**62
