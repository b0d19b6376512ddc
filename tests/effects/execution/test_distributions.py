"""Every way to draw has the distribution that its definition says, by chi-squared.

Draws of the CPU's sampler, of the GPU's kernels where there is one, and of their
reference, against exact probabilities: 100,000 and more of each with `--all`, fewer
always. Seeds are fixed, and the level is 1e-3 for all together.
"""

import math
from collections import Counter
from typing import Any, Final

import numpy as np
import pytest
import torch

from minfer.effects.execution.cpu.cpu_sampler import Sampling, choose
from minfer.kernels import sample as kernels
from minfer.kernels.sample_reference import SamplingValues
from minfer.sampling.logits import f32, shape_logits
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling, filter_tokens, lowest, stream
from tests.circles import claimed

LOGITS: Final = (1.5, -0.7, 2.2, 0.0, 1.5, -1.9, 0.6, -1.1, 1.9, 0.3, -0.2, 2.0)
PROMPT, OUTPUT = (0, 3, 3), (2, 8, 8, 11, 8)
FEW, MANY = 6_000, 120_000  # draws
SHAPE: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.5,
    "logit_bias": {5: 4.0, 2: -0.3},
    "min_tokens": 7,
    "max_tokens": None,
}
WAYS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "typical": {"typical_p": 0.6},
    "all filters": {"top_k": 9, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.2},
    "bias": {"logit_bias": {5: 5.0, 2: -1.0}},
    "allowed": {"allowed_token_ids": [1, 2, 5, 9]},
    "min tokens": {"min_tokens": 7, "max_tokens": None},
    "all": {**SHAPE, "top_p": 0.9, "temperature": 1.2},
}
STOPS, WORDS = frozenset({8, 11}), ((9,), (8, 4), (2, 8))
NEEDS_GPU: Final = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="so many rows are for the GPU"
)
SAMPLERS: Final = ("cpu", "reference", pytest.param("kernels", marks=NEEDS_GPU))
AT_ONCE: Final = 30_000  # rows: a grid's second side has 2^16 - 1 at most
# By a normal approximation of chi-squared's cube root (Wilson and Hilferty 1931).
Z: Final = 4.23  # of 1e-3 by 84 tests


def critical(freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + Z * math.sqrt(spread)) ** 3


def exact(sampling: RowSampling) -> list[float]:
    """The probability of each token, by the definitions."""
    logits = shape_logits(LOGITS, sampling, PROMPT, OUTPUT)
    scaled = [f32((x - max(logits)) / f32(sampling.temperature)) for x in logits]
    ids = filter_tokens(
        scaled, sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p
    )
    weights = {t: math.exp(scaled[t]) for t in ids}
    total = math.fsum(weights.values())
    return [weights.get(t, 0.0) / total for t in range(len(LOGITS))]


def drawn(sampler: str, sampling: RowSampling, count: int) -> Counter[int]:
    logits = torch.tensor(shape_logits(LOGITS, sampling, PROMPT, OUTPUT)).expand(
        count, -1
    )
    position = len(PROMPT) + len(OUTPUT)
    if sampler == "cpu":
        rows = [RowSampling.of(SamplingParams(), seed, 0) for seed in range(count)]
        one_row = Sampling.of([sampling], len(LOGITS))
        all_rows = Sampling(
            tuple(range(count)), one_row.params * count, Sampling.of(rows, 12).streams
        )
        tokens = choose(logits, all_rows, np.full(count, position)).tokens.tolist()
        return Counter(tokens)
    device = "cuda" if sampler == "kernels" else "cpu"
    sample = kernels.sample if sampler == "kernels" else kernels.reference
    drew: Counter[int] = Counter()
    for first in range(0, count, AT_ONCE):
        seeds = range(first, min(first + AT_ONCE, count))
        lines = logits[: len(seeds)].contiguous().to(device)
        tokens, broken = sample(lines, *arguments(sampling, seeds, position, device))
        assert not broken.any()
        drew.update(tokens.tolist())
    return drew


def arguments(
    sampling: RowSampling, seeds: range, position: int, device: str
) -> tuple[torch.Tensor, SamplingValues, torch.Tensor, torch.Tensor]:
    """Those of `kernels.sample` for a row of each seed, after the logits."""
    streams = np.array([stream(seed, 0) for seed in seeds], np.uint64)
    all_ones = torch.ones(len(seeds), device=device)
    return (
        torch.arange(len(seeds), dtype=torch.int32, device=device),
        SamplingValues(
            temperature=sampling.temperature * all_ones,
            top_k=(sampling.top_k * all_ones).int(),
            top_p=sampling.top_p * all_ones,
            deepest=-lowest(sampling.min_p) * all_ones,
            typical_p=sampling.typical_p * all_ones,
        ),
        torch.from_numpy(streams.view(np.int64)).to(device),
        torch.full((len(seeds),), position, dtype=torch.int32, device=device),
    )


@pytest.mark.long
@pytest.mark.parametrize("count", [FEW, *claimed([MANY])])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", WAYS)
def test_draws_have_the_distribution_of_the_definition(
    way: str, sampler: str, count: int
) -> None:
    words = WORDS if way in ("all", "bias") else ()
    sampling = RowSampling.of(SamplingParams(**WAYS[way]), 0, 0, STOPS, words)
    counts, shares = drawn(sampler, sampling, count), exact(sampling)
    possible = [t for t, share in enumerate(shares) if share]
    assert set(counts) <= set(possible)
    expected = {t: count * shares[t] for t in possible}
    assert min(expected.values()) > 5
    chi = sum(
        (counts[t] - expected_count) ** 2 / expected_count
        for t, expected_count in expected.items()
    )
    assert len(possible) > 1
    assert chi < critical(len(possible) - 1)
