"""Where each setting's range ends, and which settings contradict each other."""

import math
from typing import Any

import pytest
from attrs import evolve, field, frozen

from minfer.records.config import EngineConfig
from minfer.values.checks import ConfigError, number

GOOD = EngineConfig(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("num_blocks", 1),
        ("block_size", 1),
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 4),
        ("vocab_size", 1),
        ("depth", 1),
        ("max_failures", 1),
        ("max_waiting", 1),
        ("window", 0),
        ("watermark", 0),
        ("freed_run", 1),
    ],
)
def test_the_least_of_each_setting_is_taken_and_less_is_not(
    name: str, least: int
) -> None:
    right: dict[str, Any] = {name: least}
    assert getattr(evolve(GOOD, **right), name) == least
    for value in (least - 1, -1, float(least + 1), math.nan, True, "5", None):
        wrong: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=name):
            evolve(GOOD, **wrong)


def test_a_step_has_a_token_for_every_row_and_a_window_is_none_or_two() -> None:
    assert evolve(GOOD, max_num_seqs=8).max_num_seqs == 8
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        evolve(GOOD, max_num_seqs=9)
    assert evolve(GOOD, window=2).window == 2
    with pytest.raises(ConfigError, match="window"):
        evolve(GOOD, window=1)


def test_a_reserve_leaves_a_block() -> None:
    assert evolve(GOOD, watermark=7).watermark == 7
    with pytest.raises(ConfigError, match="watermark"):
        evolve(GOOD, watermark=8)


@frozen
class Numbers:
    """Fields of each kind."""

    above: float = field(default=1.0, validator=number(0, above=True, of="numbers: "))
    least: float = field(default=1.0, validator=number(0))
    whole: int = field(default=1, validator=number(-2))


def test_a_number_is_finite_of_its_kind_and_from_its_least_on() -> None:
    assert Numbers(1e-9, 0, -2) == Numbers(1e-9, 0.0, -2)
    assert Numbers(whole=2**63 - 1).whole == 2**63 - 1
    wrong: list[dict[str, Any]] = [
        {"above": 0},
        {"above": -1},
        {"above": math.inf},
        {"above": math.nan},
        {"above": True},
        {"least": -1e-9},
        {"least": math.inf},
        {"least": "1"},
        {"whole": -3},
        {"whole": 1.0},
        {"whole": 2**63},
    ]
    for fields in wrong:
        with pytest.raises(ConfigError, match=next(iter(fields))):
            Numbers(**fields)
    with pytest.raises(ConfigError, match=r"^numbers: above must be a number above 0"):
        Numbers(0)
    with pytest.raises(ConfigError, match=r"^whole must be a whole number from -2"):
        Numbers(whole=-3)


def test_a_wrong_value_is_quoted_unless_it_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"not 0$"):
        evolve(GOOD, num_blocks=0)
    with pytest.raises(ConfigError, match=r"not one that large$"):
        evolve(GOOD, num_blocks=-(10**400))
