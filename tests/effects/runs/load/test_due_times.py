"""Arrivals come at the rate that was asked for, as evenly as was asked for."""

import math
from itertools import pairwise
from statistics import mean, pvariance

import pytest

from minfer.effects.runs.load.due_times import due_times


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(
    burstiness: float,
) -> None:
    times = due_times(20_001, 50.0, burstiness, seed=1)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times[0] == 0
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50)
    assert pvariance(gaps) * 50**2 == pytest.approx(1 / burstiness, rel=0.1)


def test_an_infinite_burstiness_is_a_clock() -> None:
    assert due_times(4, 2.0, math.inf) == pytest.approx((0, 0.5, 1.0, 1.5))


def test_times_follow_from_the_seed() -> None:
    assert due_times(9, 1.0, seed=1) == due_times(9, 1.0, seed=1)
    assert due_times(9, 1.0, seed=1) != due_times(9, 1.0, seed=2)
    assert due_times(1, 3.0) == (0.0,)
