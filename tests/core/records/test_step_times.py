"""Durations of steps, from the times at which their results came."""

from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.records.step_times import StepTimes

DECODE = 0.005


def cost_on_a_gpu(tokens: int) -> float:
    """Seconds that prefill adds: hardly any up to 128 tokens, then 20 us each."""
    return 1e-6 * min(tokens, 128) + 20e-6 * max(0, tokens - 128)


def learnt(times: StepTimes, target: float, cost: float, steps: int) -> list[int]:
    """The prefill tokens of mixed steps that keep to a target; each token takes `cost`
    seconds, or what it takes on a GPU.
    """
    taken, now = list[int](), times.began
    for _ in range(steps):
        tokens = max(64, times.tokens_within(target) // 64 * 64)
        now += DECODE + (cost * tokens if cost else cost_on_a_gpu(tokens))
        times = times.after(now, 8, tokens)
        taken.append(tokens)
    return taken


def decoded(steps: int = 1) -> StepTimes:
    times = StepTimes()
    for step in range(steps):
        times = times.after((step + 1) * DECODE, 8, 0)
    return times


def test_nothing_fits_before_decode_steps_were_seen() -> None:
    assert StepTimes().tokens_within(inf) == 0
    prompt = StepTimes().after(0.1, 0, 512).after(0.2, 3, 512)
    assert (prompt.decode, prompt.tokens, prompt.began) == (0, 0, 0.2)
    assert decoded().tokens_within(DECODE) == 0, "no token is left"


def test_a_step_takes_at_most_twice_as_many_tokens_as_the_last() -> None:
    assert learnt(decoded(), 1.0, 1e-9, 5) == [64, 128, 256, 512, 1024]


def test_the_last_chunk_of_a_prompt_does_not_start_the_search_again() -> None:
    times = decoded().after(0.02, 8, 512)
    assert times.after(0.03, 8, 3).tokens_within(1.0) == 512


@pytest.mark.parametrize(("target", "tokens"), [(0.006, 64), (0.01, 192), (0.02, 704)])
def test_a_linear_cost_is_found(target: float, tokens: int) -> None:
    assert learnt(decoded(3), target, 20e-6, 40)[-10:] == [tokens] * 10


def test_a_cost_that_begins_late_is_rarely_exceeded() -> None:
    target = 0.006
    taken = learnt(decoded(3), target, 0, 400)[20:]
    over = [tokens for tokens in taken if DECODE + cost_on_a_gpu(tokens) > 1.02 * target]
    worst = max(DECODE + cost_on_a_gpu(tokens) for tokens in taken)
    assert worst < 1.1 * target
    assert len(over) <= len(taken) // 12
    assert sum(taken) / len(taken) > 100, "most of what is free is taken"


def test_a_step_that_waited_for_a_compilation_is_soon_forgotten() -> None:
    usual = decoded(9).after(0.051, 8, 128)
    late = usual.after(5.0, 8, 128)
    assert late.token <= 4 * usual.token
    assert late.after(9.0, 8, 0).decode <= 1.5 * DECODE


def test_two_results_in_one_turn_and_a_clock_that_stands_still() -> None:
    times = decoded(2)
    assert times.after(times.began, 8, 64) == times
    assert times.after(times.began - 1, 8, 64) == times


@given(st.integers(0, 2**32))
def test_any_times_leave_numbers(seed: int) -> None:
    rng, times = Random(seed), StepTimes()
    for _ in range(20):
        time = rng.choice((rng.random(), rng.uniform(0, 1e300), inf, 0.0, 1e-300))
        times = times.after(time, rng.choice((0, 1, 300)), rng.choice((0, 1, 10_000)))
        assert times.decode >= 0
        assert times.token >= 0
        for seconds in (0.0, 1e-9, 1.0, 1e300, inf):
            assert 0 <= times.tokens_within(seconds) <= 20_000
    assert nan not in (times.decode, times.token)
