"""What cannot be is refused before a server starts, by its name."""

from typing import Any

import pytest
from attrs import evolve

from minfer.journal.codec import dump, load
from minfer.records.acceptance import Costs, Learning
from minfer.records.config import EngineConfig
from minfer.records.speculation import (
    DEVICE,
    DRAFTERS,
    HOST,
    MOST_DRAFTS,
    REJECTION,
    RULES,
    SAME_NOISE,
    Speculation,
)
from minfer.values.checks import ConfigError

GOOD: dict[str, Any] = {"drafter": HOST, "drafts": 4, "adaptive": False}
COSTS = Costs(((1, 0.5), (8, 1.0)), draft=0.1, fixed=0.2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"drafter": "unknown"}, "drafter must be 'host' or 'device', not 'unknown'"),
        ({"drafter": 3}, "drafter must be 'host' or 'device', not 3"),
        ({"rule": "any"}, "rule must be 'same noise' or 'rejection', not 'any'"),
        ({"drafts": 0}, "drafts must be a whole number from 1, not 0"),
        ({"drafts": 1.0}, "drafts must be a whole number"),
        ({"drafts": True}, "drafts must be a whole number"),
        ({"drafts": MOST_DRAFTS + 1}, "drafts must be at most 64, not 65"),
        ({"rows": -1}, "rows must be a whole number from 0, not -1"),
        ({"learning": None}, "learning must be Learning, not None"),
        ({"costs": 3}, "costs must be Costs or none, not 3"),
        ({"adaptive": True}, r"costs .* needed .* \(adaptive: false\)"),
        ({"margin": -0.1}, "margin must be a number from 0, not -0.1"),
    ],
)
def test_what_is_out_of_range_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculation: {why}"):
        Speculation(**{**GOOD, **change})


def test_adaptive_is_a_flag() -> None:
    with pytest.raises(ConfigError, match="adaptive must be true or false, not 1"):
        Speculation(**{**GOOD, "adaptive": 1})


def test_long_nonsense_is_quoted_shortly() -> None:
    with pytest.raises(ConfigError) as caught:
        Speculation(**{**GOOD, "drafter": "x" * 1000})
    assert len(str(caught.value)) < 200


def test_bounds_themselves_may_be() -> None:
    most = Speculation(drafter=DEVICE, drafts=MOST_DRAFTS, rule=REJECTION, costs=COSTS)
    assert most.adaptive
    assert most.margin == 0.03
    least = Speculation(**{**GOOD, "drafts": 1, "rows": 0, "margin": 0})
    assert (least.rule, least.rows, least.costs) == (SAME_NOISE, 0, None)
    assert (DRAFTERS, RULES) == ((HOST, DEVICE), (SAME_NOISE, REJECTION))


@pytest.mark.parametrize("value", ["yes", 4, True, {"drafts": 4}])
def test_a_config_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ConfigError, match="speculation must be Speculation or none, not"):
        EngineConfig(num_blocks=8, speculation=value)


@pytest.mark.parametrize(
    "how",
    [
        Speculation(**GOOD),
        Speculation(drafter=DEVICE, drafts=7, costs=COSTS, learning=Learning(kept=0.5)),
    ],
)
def test_a_journal_keeps_it(how: Speculation) -> None:
    config = EngineConfig(num_blocks=8, speculation=how)
    assert load(dump(config)) == config
    assert load(dump(evolve(config, speculation=None))).speculation is None
