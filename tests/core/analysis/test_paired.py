"""Intervals of medians: their coverage, exactly and by simulation."""

from itertools import product
from random import Random

import pytest

from minfer.analysis.paired import MIN_DRAWS, median_interval, paired_difference


@pytest.mark.parametrize("count", range(MIN_DRAWS, 13))
def test_the_interval_covers_the_true_median_in_95_percent(count: int) -> None:
    """By all ways in which draws fall on both sides of it, each as likely; and no
    narrower interval of this kind would.
    """
    covered = narrower = 0
    for sides in product((-1.0, 1.0), repeat=count):
        # Distinct draws with the true median 0 between them.
        draws = [side * (1 + place) for place, side in enumerate(sides)]
        found = median_interval(draws)
        covered += found.low < 0 < found.high
        ordered = sorted(draws)
        low = ordered.index(found.low)
        narrower += ordered[low + 1] < 0 < ordered[-low - 2]
    assert covered / 2**count >= 0.95
    assert narrower / 2**count < 0.95


def test_few_draws_have_no_interval() -> None:
    with pytest.raises(ValueError, match="5 draws are too few"):
        median_interval([1.0] * (MIN_DRAWS - 1))


def test_differences_are_paired() -> None:
    """What varies from seed to seed, but not between the two, is no noise."""
    rng = Random(1)
    loads = [rng.uniform(0, 100) for _ in range(8)]
    found = paired_difference(loads, [load + 0.5 + rng.random() / 9 for load in loads])
    assert found.excludes_zero
    assert 0.5 <= found.low <= found.median <= found.high <= 0.62
    assert not paired_difference(loads, loads).excludes_zero
    assert not paired_difference(loads, loads[::-1]).excludes_zero
