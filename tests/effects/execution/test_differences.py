"""What counts as near, and that a device without a GPU's logarithms never differs."""

import random

import numpy as np
import pytest
import torch

from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling, draw, filter_tokens
from tests.effects.execution.differences import (
    UNIT,
    Batch,
    Scale,
    compared,
    left,
    reason,
)
from tests.effects.execution.shapes import random_row


def test_kept_tokens_are_those_of_the_definition() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sampling = random_row(rng, 60)
        x = np.array([rng.gauss(0, 3) for _ in range(60)], np.float32)
        depth = x.max() - x
        reported = (sampling.top_k, sampling.top_p, sampling.min_p, sampling.typical_p)
        expected = filter_tokens((-depth).tolist(), *reported)
        kept_mask = left(depth.astype(np.float64), sampling, Scale())
        assert np.flatnonzero(kept_mask).tolist() == expected


@pytest.mark.parametrize(("off", "word"), [(3, "cut"), (300, "none")])
def test_a_token_whose_mass_nearly_meets_top_p(off: int, word: str) -> None:
    """Of two, the second is kept only if top-p were a little more than half."""
    sampling = RowSampling.of(SamplingParams(top_p=0.5 - off * 2 * UNIT / 4), 5, 0)
    logits = [1.0, 1.0]
    defaults = SamplingParams()
    position = next(i for i in range(99) if draw(logits, defaults, 5, 0, i) == 1)
    assert draw(logits, sampling, 5, 0, position) == 0
    assert reason(logits, sampling, position, 1) == word


@pytest.mark.parametrize(("off", "word"), [(1, "draw"), (300, "none")])
def test_tokens_whose_scores_are_nearly_equal(off: int, word: str) -> None:
    sampling = RowSampling.of(SamplingParams(), 5, 0)
    low, high = bracket(sampling)
    assert draw([0.0, low], sampling, 5, 0, 3) == 0
    assert draw([0.0, high], sampling, 5, 0, 3) == 1
    assert reason([0.0, low - off * UNIT], sampling, 3, 1) == word


def bracket(sampling: RowSampling) -> tuple[float, float]:
    """Logits of the second that are just not, and just, drawn beside 0."""
    low, high = -30.0, 30.0
    while high - low > UNIT:
        middle = (low + high) / 2
        if draw([0.0, middle], sampling, 5, 0, 3) == 0:
            low = middle
        else:
            high = middle
    return low, high


@pytest.mark.long
def test_the_kernels_references_differ_nowhere() -> None:
    for vocab in (20, 150):
        differences = compared(
            Batch(vocab, 8, torch.device("cpu")), 150, random.Random(vocab)
        )
        assert differences["draws"] == 150
        assert differences["differ"] == 0
