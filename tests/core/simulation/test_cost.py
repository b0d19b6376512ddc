"""What a step costs is linear in its work, which is counted forward by forward."""

import pytest
from attrs import evolve

from minfer.journal.codec import dump, load
from minfer.records.speculation import DEVICE, HOST
from minfer.simulation.cost import CostModel, StepWork, drafts_of, work_of
from minfer.simulation.simulate import Arrival, Simulated, Simulation
from minfer.values.checks import ConfigError
from tests.core.simulation.test_simulate import (
    EVEN,
    by_hand,
    config_of,
    plans,
    requested,
    with_drafts,
)


def test_cost_is_linear_in_the_work_and_by_bucket() -> None:
    cost = CostModel(
        name="x",
        decode=((2, 1.0), (4, 2.0)),
        mixed=8.0,
        token=0.1,
        sequence=0.01,
        chunk=0.001,
        context=1e-4,
        attention=1e-5,
    )
    simulation = Simulation(
        config_of(), Simulated(), cost, [(0.0, requested(n)) for n in "abc"]
    )
    mixed, decode, *_ = plans([*simulation.turns()])
    assert work_of(mixed) == StepWork(
        prefill_tokens=12,
        decode_rows=0,
        prefill_chunks=3,
        read_positions=12,
        attended_positions=30,
    )
    assert cost.seconds(mixed) == pytest.approx(8 + 1.2 + 0.003 + 12e-4 + 30e-5)
    assert work_of(decode) == StepWork(
        prefill_tokens=0,
        decode_rows=3,
        prefill_chunks=0,
        read_positions=15,
        attended_positions=0,
    )
    assert cost.seconds(decode) == pytest.approx(2 + 0.03 + 15e-4)
    assert evolve(cost, decode=((1, 1.0), (2, 3.0))).seconds(decode) == pytest.approx(
        3.0315
    )
    own = evolve(cost, launch=1.0, captured=11, eager=16.0, eager_token=0.2)
    assert own.seconds(mixed) == pytest.approx(16 + 2.4 + 0.003 + 12e-4 + 30e-5)
    assert own.seconds(decode) == cost.seconds(decode)
    assert evolve(own, captured=12).seconds(mixed) == cost.seconds(mixed)


def test_nothing_costs_less_than_nothing() -> None:
    with pytest.raises(ConfigError, match="cost model: context must be a number from 0"):
        evolve(EVEN, context=-1e-9)


def test_drafts_cost_what_as_many_rows_would_and_the_model_that_says_them() -> None:
    cost = CostModel(
        name="x",
        decode=((2, 1.0), (4, 2.0), (8, 4.0)),
        mixed=8.0,
        token=0.1,
        sequence=0.01,
        draft=0.5,
    )
    for drafter, model in ((DEVICE, 3 * 0.5), (HOST, 0.0)):
        config = with_drafts(drafter, 3, depth=1)
        come: list[Arrival] = [
            (0.0, requested("a", most=30)),
            (0.0, requested("b", most=30)),
        ]
        turns = [*Simulation(config, Simulated(), cost, come).turns()]
        step = next(plan for plan in plans(turns) if plan.drafts)
        assert drafts_of(step) == 6
        assert work_of(step) == by_hand(step)
        assert cost.seconds(step) == pytest.approx(4.0 + 8 * 0.01 + model)


def test_what_decides_about_drafts_follows_from_the_model() -> None:
    cost = evolve(EVEN, decode=((2, 3.0), (8, 2.0)), sequence=0.5, draft=0.25, host=0.1)
    costs = cost.costs(16)
    assert costs.verify == ((1, 3.5), (2, 4.0), (4, 4.0), (8, 6.0), (16, 10.0))
    assert (costs.draft, costs.fixed) == (0.25, 0.1)
    free = evolve(EVEN, decode=((1, 0.0),)).costs(3)
    assert free.seconds(3) > 0


def test_a_file_from_before_there_were_drafts_still_reads() -> None:
    record = dump(evolve(EVEN, draft=0.5))
    del record["draft"]
    assert load(record, {"CostModel": CostModel}) == EVEN
