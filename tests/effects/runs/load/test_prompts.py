"""Prompts: of the lengths that were asked for, the same for the same number, and alike
only where they are to be.
"""

import json
from typing import Any

import pytest

from minfer.effects.runs.arrivals import Row
from minfer.effects.runs.load.prompts import (
    FIRST_ID,
    Listed,
    ListedPrompts,
    Prompts,
    RandomPrompts,
    Tokens,
    TracePrompts,
)


def prompt(prompts: Prompts, number: int) -> Any:
    return json.loads(prompts.ask(number).prompt)


def test_random_prompts_have_their_lengths_and_ids() -> None:
    made = RandomPrompts(Tokens(vocab_size=300), 200, 50, prefix_len=10)
    first, second = prompt(made, 0), prompt(made, 1)
    assert len(first) == len(second) == 210
    assert first[:10] == second[:10]
    assert first[10:20] != second[10:20]
    assert min(first) >= FIRST_ID
    assert max(first) < 300
    assert len(set(first)) > 100
    assert made.ask(0).max_tokens == 50


def test_a_prompt_is_a_function_of_seed_run_and_number() -> None:
    made = RandomPrompts(Tokens(), 20, 5, prefix_len=4, seed="3")
    assert made.ask(7) == RandomPrompts(Tokens(), 20, 5, prefix_len=4, seed="3").ask(7)
    other, warm = prompt(made.of_run(1), 7), prompt(made, -1)
    assert other[:4] == warm[:4] == prompt(made, 7)[:4]
    assert len({tuple(one) for one in (other, warm, prompt(made, 7))}) == 3
    assert made.of_run(1).of_run(2) == made.of_run(2)


def test_lengths_vary_within_their_ratio() -> None:
    made = RandomPrompts(Tokens(), 100, 10, range_ratio=0.5)
    asks = [made.ask(number) for number in range(300)]
    lengths = {len(json.loads(one.prompt)) for one in asks}
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    assert {one.max_tokens for one in asks} == set(range(5, 16))


def test_words_are_a_string() -> None:
    made = RandomPrompts(Tokens(words=True), 30, 5, prefix_len=2)
    assert len(prompt(made, 0).split(" ")) == 32


def test_a_traces_prompts_begin_alike_where_it_says_so() -> None:
    rows = [
        Row(0, 25, 5, (1, 2, 3), 10),
        Row(0, 22, 0, (1, 2, 4), 10),
        Row(0, 3, 5, (9,)),
    ]
    made = TracePrompts(Tokens(), rows)
    first, second, third = (prompt(made, number) for number in range(3))
    assert [len(one) for one in (first, second, third)] == [25, 22, 3]
    assert first[:20] == second[:20]
    assert first[20:22] != second[20:]
    assert made.ask(1).max_tokens == 1
    warm, other = prompt(made, -3), prompt(made.of_run(1), 0)
    assert len(warm) == len(other) == 25
    assert warm[:10] != first[:10] != other[:10]


def test_listed_prompts_come_in_turn_and_again() -> None:
    told = [Listed("hé", 3), Listed((1, 2), 4)]
    made = ListedPrompts(told)
    assert [prompt(made, number) for number in range(3)] == ["hé", [1, 2], "hé"]
    assert [made.ask(number).max_tokens for number in range(3)] == [3, 4, 3]
    assert made.of_run(4) is made


@pytest.mark.parametrize("size", [17, 20])
def test_small_vocabularies_are_kept_to(size: int) -> None:
    drawn = {int(one) for one in Tokens(size).draw("x", 500)}
    assert drawn == set(range(FIRST_ID, size))
