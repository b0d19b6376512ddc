"""What steps cost, measured by dummy steps."""

import time

import pytest
from attrs import evolve

from minfer.effects.execution.device.step_shape import StepShape
from minfer.effects.execution.running.draft_model import LoadedDraft
from minfer.effects.execution.running.runner import ModelRunner
from minfer.effects.execution.warming import step_costs as measured
from minfer.effects.execution.warming.step_costs import step_costs
from minfer.records.config import EngineConfig
from minfer.records.speculation import DEVICE, HOST, RULES, Speculation
from tests.effects.execution.tiny_engine import (
    VOCAB,
    Model,
    make_executor,
    on_device,
)

pytestmark = pytest.mark.usefixtures("device_kind")
CONFIG = EngineConfig(
    num_blocks=40,
    block_size=8,
    max_model_len=64,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    vocab_size=VOCAB,
    depth=2,  # without graphs
)
HOW = Speculation(drafter=HOST, drafts=3, adaptive=False)


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [HOST, DEVICE])
def test_costs_are_of_all_sizes_that_an_engine_has(
    model: Model, drafter: str, rule: str
) -> None:
    spec_config = evolve(HOW, drafter=drafter, rule=rule)
    weights = on_device(model.weights)
    draft = LoadedDraft(model.spec, weights) if drafter == DEVICE else None
    config = evolve(CONFIG, speculation=spec_config)
    executor = make_executor(config, model.spec, weights, draft)
    costs = executor.step_costs(spec_config)
    sizes = [size for size, _ in costs.verify]
    rows = CONFIG.max_num_seqs
    assert sizes[0] == 1
    assert rows in sizes
    assert sizes[-1] >= rows * (1 + spec_config.drafts)
    # A draft's forward is the difference of two times, which may be lost in noise.
    assert costs.draft >= 0 if drafter == DEVICE else costs.draft == 0
    assert costs.fixed >= (0 if drafter == DEVICE else measured.TURN_SECONDS["cpu"])
    assert 0 < costs.seconds(1) < 10
    assert costs.beside == 0  # there are no graphs


def test_costs_are_those_measured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input takes a second, judging drafts two, and each forward of a draft half
    of one, and a tenth for each row beside the first.
    """

    def seconds(_: ModelRunner, shape: StepShape) -> float:
        row_seconds = 0.5 + (shape.verified - 1) / 10
        judged, proposed = (
            2 * bool(shape.drafts),
            shape.proposes * shape.drafts * row_seconds,
        )
        return shape.decode_inputs + judged * (shape.decode_rows == 1) + proposed

    monkeypatch.setattr(measured, "_seconds", seconds)
    spec_config = evolve(HOW, drafter=DEVICE)
    config = evolve(CONFIG, speculation=spec_config)
    weights = on_device(model.weights)
    draft = LoadedDraft(model.spec, weights)
    executor = make_executor(config, model.spec, weights, draft)
    costs = step_costs(executor.dummy_runner, spec_config)
    assert all(cost == size for size, cost in costs.verify)
    assert costs.draft == pytest.approx(0.5)
    seats = config.max_num_seqs
    for rows in (1, 4, seats):
        assert costs.drafted(rows) == pytest.approx(0.5 + (min(rows, seats) - 1) / 10)
    assert costs.fixed <= 2
    by_host = step_costs(executor.dummy_runner, HOW)
    assert by_host.draft == 0
    turn = measured.TURN_SECONDS[executor.device.type]
    assert by_host.fixed == pytest.approx(costs.fixed + turn)


@pytest.mark.long
@pytest.mark.parametrize("drafts", [1, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_no_step_is_tried_that_there_is_no_room_for(
    model: Model, drafts: int, rows: int
) -> None:
    """Few rows may have drafts, and many run."""
    spec_config = evolve(HOW, drafts=drafts, rows=rows)
    config = evolve(
        CONFIG, speculation=spec_config, max_num_seqs=48, max_num_batched_tokens=48
    )
    executor = make_executor(config, model.spec, on_device(model.weights))
    costs = executor.step_costs(spec_config)
    assert costs.verify[-1][0] >= min(rows or 48, 48)


def test_steps_that_others_held_up_do_not_count(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(CONFIG, model.spec, on_device(model.weights))
    clock = iter([0, 9, 10, 17, 20, 23, 30, 38, 40, 49, 50, 54.0])  # the third is quick
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert (
        measured._seconds(executor.dummy_runner, StepShape(decode_rows=1, draws=1)) == 3
    )
