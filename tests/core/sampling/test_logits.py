"""What is done to logits: each rule by example, and their order."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.sampling.logits import f32, is_penalized, is_shaped, shape_logits
from minfer.sampling.params import SamplingParams
from minfer.sampling.reference_sampler import RowSampling, next_token

NEVER = -math.inf


def row(
    stop_ids: Sequence[int] = (), bad_words: Sequence[tuple[int, ...]] = (), **how: Any
) -> RowSampling:
    params = SamplingParams(**{"temperature": 0, "max_tokens": None, **how})
    return RowSampling.of(params, 0, 0, frozenset(stop_ids), tuple(bad_words))


def made(
    logits: Sequence[float],
    how: RowSampling,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[float]:
    return shape_logits(logits, how, prompt, output)


def test_only_what_is_allowed_is_left() -> None:
    how = row(allowed_token_ids=[2, 0])
    assert made((1.0, 2.0, 3.0), how) == [1.0, NEVER, 3.0]


def test_a_bias_is_added() -> None:
    assert made((1.0, 2.0), row(logit_bias={1: -0.5})) == [1.0, 1.5]
    assert made((NEVER, 2.0), row(logit_bias={0: 100})) == [NEVER, 2.0]


def test_repetition_divides_what_is_positive_and_multiplies_the_rest() -> None:
    how = row(repetition_penalty=2)
    assert made((4.0, -4.0, 0.0, 4.0), how, [0, 1, 2]) == [2.0, -8.0, 0.0, 4.0]
    assert made((4.0, 4.0), how, [0], [1, 1]) == [2.0, 2.0]
    assert made((0.5, -0.5), how, [0, 1]) == [0.25, -1.0]


def test_frequency_and_presence_look_only_at_the_output() -> None:
    assert made((4.0, 4.0, 4.0), row(frequency_penalty=0.5), [0], [1, 1]) == [
        4.0,
        3.0,
        4.0,
    ]
    assert made((4.0, 4.0, 4.0), row(presence_penalty=0.5), [0], [1, 1]) == [
        4.0,
        3.5,
        4.0,
    ]


def test_ends_are_hidden_until_there_are_enough_tokens() -> None:
    how = row(stop_ids=[1, 2, 99], min_tokens=2)  # of a larger vocabulary, too
    assert made((1.0, 2.0), how, [0]) == [1.0, NEVER]
    assert made((1.0, 2.0), how, [0], [0]) == [1.0, NEVER]
    assert made((1.0, 2.0), how, [0], [0, 0]) == [1.0, 2.0]


def test_the_end_of_a_bad_word_is_hidden_behind_its_beginning() -> None:
    how = row(bad_words=[(0,), (1, 2), (1, 1, 3)])
    logits = (9.0,) * 4
    assert made(logits, how, [1]) == [NEVER, 9.0, 9.0, 9.0]  # prompts do not count
    assert made(logits, how, [], [1]) == [NEVER, 9.0, NEVER, 9.0]
    assert made(logits, how, [], [1, 1]) == [NEVER, 9.0, NEVER, NEVER]
    assert made(logits, how, [1], [1]) == [NEVER, 9.0, NEVER, 9.0]
    assert made(logits, how, [], [1, 2]) == [NEVER, 9.0, 9.0, 9.0]


def test_the_order_is_bias_repetition_frequency_presence() -> None:
    how = row(
        logit_bias={0: 3},
        repetition_penalty=2,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert made((-1.0,), how, [], [0, 0]) == [(-1 + 3) / 2 - 2 * 0.25 - 0.5]


def test_greedy_takes_what_is_largest_after_all_this() -> None:
    logits, known = (1.0, 3.0, 2.0), [0, 1]
    assert next_token(logits, row(), known, 1) == 1
    assert next_token(logits, row(presence_penalty=1.5), known, 1) == 2
    assert next_token(logits, row(logit_bias={0: 9}), known, 1) == 0
    assert next_token(logits, row(bad_words=[(1,), (1, 2)]), known, 1) == 0


@pytest.mark.parametrize(
    ("how", "shapes", "counts"),
    [
        (row(), False, False),
        (row(temperature=0.5, top_p=0.5, typical_p=0.5, logprobs=3), False, False),
        (row(stop_ids=[3]), False, False),
        (row(min_tokens=3), False, False),
        (row(min_tokens=3, stop_ids=[3]), True, False),
        (row(logit_bias={3: 0.5}), True, False),
        (row(allowed_token_ids=[3]), True, False),
        (row(bad_words=[(3,)]), True, False),
        (row(repetition_penalty=1.1), True, True),
        (row(presence_penalty=-0.1), True, True),
        (row(frequency_penalty=0.1), True, True),
    ],
)
def test_who_asks_for_something(how: RowSampling, shapes: bool, counts: bool) -> None:
    assert (is_shaped(how), is_penalized(how)) == (shapes, counts)


@given(st.lists(st.floats(width=32), min_size=1, max_size=9), st.integers(0, 8))
def test_who_asks_for_nothing_has_the_models_logits(
    logits: list[float], token: int
) -> None:
    found = made(logits, row(stop_ids=[token]), [0], [0])
    assert [math.isnan(x) or x for x in found] == [math.isnan(x) or x for x in logits]


@given(st.floats(0.01, 2), st.floats(-2, 2), st.integers(0, 5))
def test_all_is_in_float32(factor: float, penalty: float, count: int) -> None:
    how = row(repetition_penalty=factor, frequency_penalty=penalty)
    for x in made((1.1, -1.1), how, [0, 1], [0] * count):
        assert x == f32(x)
