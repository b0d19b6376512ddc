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
        how = random_row(rng, 60)
        x = np.array([rng.gauss(0, 3) for _ in range(60)], np.float32)
        depth = x.max() - x
        reported = (how.top_k, how.top_p, how.min_p, how.typical_p)
        expected = filter_tokens((-depth).tolist(), *reported)
        found = left(depth.astype(np.float64), how, Scale())
        assert np.flatnonzero(found).tolist() == expected


@pytest.mark.parametrize(("off", "word"), [(3, "cut"), (300, "none")])
def test_a_token_whose_mass_nearly_meets_top_p(off: int, word: str) -> None:
    """Of two, the second is kept only if top-p were a little more than half."""
    how = RowSampling.of(SamplingParams(top_p=0.5 - off * 2 * UNIT / 4), 5, 0)
    logits = [1.0, 1.0]
    every = SamplingParams()
    position = next(i for i in range(99) if draw(logits, every, 5, 0, i) == 1)
    assert draw(logits, how, 5, 0, position) == 0
    assert reason(logits, how, position, 1) == word


@pytest.mark.parametrize(("off", "word"), [(1, "draw"), (300, "none")])
def test_tokens_whose_scores_are_nearly_equal(off: int, word: str) -> None:
    how = RowSampling.of(SamplingParams(), 5, 0)
    low, high = bracket(how)
    assert draw([0.0, low], how, 5, 0, 3) == 0
    assert draw([0.0, high], how, 5, 0, 3) == 1
    assert reason([0.0, low - off * UNIT], how, 3, 1) == word


def bracket(how: RowSampling) -> tuple[float, float]:
    """Logits of the second that are just not, and just, drawn beside 0."""
    low, high = -30.0, 30.0
    while high - low > UNIT:
        middle = (low + high) / 2
        if draw([0.0, middle], how, 5, 0, 3) == 0:
            low = middle
        else:
            high = middle
    return low, high


@pytest.mark.long
def test_the_kernels_references_differ_nowhere() -> None:
    for vocab in (20, 150):
        found = compared(Batch(vocab, 8, torch.device("cpu")), 150, random.Random(vocab))
        assert found["draws"] == 150
        assert found["differ"] == 0
