"""Layouts: costs are those that were measured, and a bisection ends where it should."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import layouts
from bench.layout_costs import Layout, config_of, four_ranks, one_rank, two_ranks
from bench.layout_runs import TPOT, TTFT, TooSlowError, simulation
from bench.layouts import MAX_RATE_RATIO, Search, highest
from minfer.effects.runs.arrivals import ArrivalTrace, TraceRow
from minfer.records.messages import Execute
from minfer.simulation.cost import CostModel
from minfer.simulation.replicas import ReplicaTurn


def test_a_prompt_and_a_row_take_what_was_measured() -> None:
    """One replica, one prompt of 8,192 tokens: 201.1 ms, and then steps of a row."""
    trace = ArrivalTrace((TraceRow(0.0, 8192, 3, (1,)),))
    simulated = simulation(Layout("", budget=8192), trace, 1.0, 1)
    costs = [
        simulated.cost.seconds(command.plan)
        for event in simulated.run()
        if isinstance(event, ReplicaTurn)
        for command in event.turn.transition.commands
        if isinstance(command, Execute)
    ]
    assert costs[0] == pytest.approx(0.2011, rel=1e-3)
    assert costs[1] == pytest.approx(5.375e-3 + 7592 * simulated.cost.context, rel=1e-3)


@pytest.mark.parametrize("model", [one_rank(), two_ranks(), four_ranks()])
def test_more_work_costs_more(model: Any) -> None:
    cost: CostModel = model.model("")
    seconds = [took for _, took in cost.decode]
    assert seconds == sorted(seconds)
    assert 0 < cost.attention * 8192 < cost.token


def test_two_cards_have_more_than_twice_the_blocks() -> None:
    """Weights are there once."""
    one_card, two_cards = (
        config_of(Layout("", ranks), 2048).num_blocks for ranks in (1, 2)
    )
    assert two_cards > 2 * one_card


@pytest.mark.parametrize("start", [0.9, 3.0, 8.0])
@pytest.mark.parametrize("raises", [False, True])
def test_the_highest_speed_that_keeps_the_limits(
    monkeypatch: pytest.MonkeyPatch, start: float, raises: bool
) -> None:
    def figures(_: Layout, __: Any, speed: float, percentile: int) -> Any:
        if raises and speed > 4.0:
            raise TooSlowError
        late = 2.0 if speed > 4.0 else 1.0
        name = f"p{percentile}"
        return {"speed": speed, "ttft": {name: TTFT * late}, "tpot": {name: TPOT}}

    monkeypatch.setattr(layouts, "figures", figures)
    result = highest(SimpleNamespace(), Search(Layout("x"), 90, start))  # type: ignore[arg-type]  # it is not looked at
    assert result["keeps"]["speed"] <= 4.0 < result["fails_at_speed"]
    assert result["fails_at_speed"] / result["keeps"]["speed"] <= MAX_RATE_RATIO


def test_a_layout_that_never_keeps_them_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def figures(*_: Any, **__: Any) -> Any:
        raise TooSlowError

    monkeypatch.setattr(layouts, "figures", figures)
    assert highest(SimpleNamespace(), Search(Layout("x"), 99, 3.0))["keeps"] is None  # type: ignore[arg-type]  # it is not looked at
