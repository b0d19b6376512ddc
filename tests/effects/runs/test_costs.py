"""A fit finds what steps cost, whatever else happens while they run."""

import json
import math
from functools import cache
from pathlib import Path
from random import Random

import pytest
from attrs import astuple, evolve

from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.costs import (
    MeasuredStep,
    fit,
    measured_steps,
    read_cost,
    write_cost,
)
from minfer.effects.runs.report import Report
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import Simulated, Simulation
from minfer.values.checks import ConfigError
from tests.effects.runs.test_simulate_command import COST, reported


@cache
def measured(seed: int, cost: CostModel = COST) -> list[MeasuredStep]:
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_model_len=20_000)
    rows = read_trace(
        f"poisson:rate=8,requests=250,prompt=400,output=40,spread=1,seed={seed}"
    )
    return [
        *measured_steps(Simulation(config, Simulated(), cost, rows.arrivals(64)).turns())
    ]


@pytest.mark.long
def test_a_fit_finds_what_steps_cost() -> None:
    cost, summary = fit(measured(1), "x")
    assert abs(summary["held_out_error"]["total"]) < 1e-3
    assert summary["held_out_error"]["step"] < 1e-2
    for steps in (measured(2), measured(3)):
        top = cost.decode[-1][0]  # of the rows that there were often enough
        ratios = [
            _seconds(cost, step) / step.seconds for step in steps if step.rows <= top
        ]
        assert len(ratios) > 0.98 * len(steps)
        assert min(ratios) > 0.98
        assert max(ratios) < 1.02


@pytest.mark.long
def test_a_fit_finds_what_launches_take_the_host() -> None:
    """Whose steps before them seem longer, and they themselves shorter."""
    real_cost = evolve(COST, launch=0.03, captured=600, eager=0.002, eager_token=3e-5)
    cost, summary = fit(measured(1, cost=real_cost), "x")
    assert abs(summary["held_out_error"]["total"]) < 1e-2
    assert cost.launch == pytest.approx(real_cost.launch, rel=0.02)
    assert 540 <= cost.captured <= 620
    assert cost.eager + 1000 * cost.eager_token == pytest.approx(0.032, rel=0.03)
    assert cost.mixed + 300 * cost.token == pytest.approx(0.013, rel=0.03)
    for limit in (0, 20_000):  # all launches take long, or none
        fitted, _ = fit(measured(1, cost=evolve(real_cost, captured=limit)), "x")
        assert fitted.launch == (pytest.approx(0.03, rel=0.02) if limit == 0 else 0)
        assert fitted.captured == 0


def _seconds(cost: CostModel, step: MeasuredStep) -> float:
    buckets = (seconds for top, seconds in cost.decode if step.rows <= top)
    base = next(buckets, cost.decode[-1][1]) if step.rows else cost.mixed
    of_rows = (cost.token, cost.sequence, cost.chunk)
    rates = (*of_rows, cost.context, cost.attention, cost.draft)
    terms = zip(rates, astuple(step.work), strict=True)
    return base + math.fsum(rate * much for rate, much in terms)


@pytest.mark.long
def test_interruptions_do_not_spoil_a_fit() -> None:
    rng = Random(0)
    noisy = []
    for step in measured(1):
        noise = rng.lognormvariate(0, 0.1) * (30 if rng.random() < 0.02 else 1)
        noisy.append(evolve(step, seconds=step.seconds * noise))
    cost, summary = fit(noisy, "x")
    clean = measured(2)
    predicted = sum(_seconds(cost, step) for step in clean)
    took = sum(step.seconds for step in clean)
    assert predicted / took == pytest.approx(1, abs=0.03)
    assert summary["held_out_error"]["step"] == pytest.approx(0.067, abs=0.02)


def test_steps_that_take_longer_now_and_then_are_in_the_total() -> None:
    rng = Random(0)
    noisy = [
        evolve(step, seconds=step.seconds * (1.4 if rng.random() < 0.05 else 1))
        for step in measured(1)
    ]
    cost, _ = fit(noisy, "x")
    predicted = sum(_seconds(cost, step) for step in noisy)
    took = sum(step.seconds for step in noisy)
    assert predicted == pytest.approx(took, rel=0.005)


def test_nothing_is_below_zero_and_too_few_steps_are_refused() -> None:
    rng = Random(1)
    noise = [evolve(step, seconds=0.01 * rng.random() + 1e-4) for step in measured(1)]
    cost, _ = fit(noise, "x")
    assert min(cost.token, cost.sequence, cost.chunk, cost.context, cost.mixed) >= 0
    with pytest.raises(
        ConfigError, match="x: 255 steps are too few to fit; 256 are needed"
    ):
        fit(noise[:255], "x")
    with pytest.raises(ConfigError, match="x: 0 steps are too few"):
        fit([], "x")


@pytest.mark.long
def test_a_fitted_journal_predicts_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_model_len=20_000)
    text = "poisson:rate=8,requests=150,prompt=400,output=40,spread=1,seed={}"
    real = {}
    for seed in (1, 2):
        report, trace = Report(config), read_trace(text.format(seed))
        turns = Simulation(
            config, Simulated(), COST, report.note_arrivals(trace.arrivals(64))
        ).turns()
        write_journal(
            tmp_path / f"{seed}.journal", config, report.fold_turns(turns), {"model": "m"}
        )
        real[seed] = report.figures()
    cost = tmp_path / "cost.json"
    sizes = (
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "2048",
        "--num-blocks",
        "2000",
    )
    results = reported(
        capsys,
        text.format(2),
        "--fit",
        str(tmp_path / "1.journal"),
        "--save-cost",
        str(cost),
        "--max-model-len",
        "20000",
        *sizes,
    )
    assert results["ran"] == {"model": "m"}
    assert abs(results["held_out_error"]["total"]) < 1e-3
    run = results["runs"][0]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for share in ("p50", "p99"):
            assert run[name][share] == pytest.approx(real[2][name][share], rel=0.02)
    repeated = reported(
        capsys, text.format(2), "--cost", str(cost), "--max-model-len", "20000", *sizes
    )
    assert repeated["runs"][0]["ttft"] == run["ttft"]
    assert "on steps held out" in repeated["cost"]["name"]


def test_a_kept_cost_model_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    write_cost(path, COST, {"why": "test"})
    assert read_cost(path) == COST
    assert json.loads(path.read_text())["about"] == {"why": "test"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "7",
        '{"model": 3}',
        '{"model": {}}',
        '{"model": {"name": "x"}}',
        "\xff",
        '{"model": {"name": "x", "decode": [[1, 1]], "mixed": -1, "token": 0}}',
        '{"model": {"name": "x", "decode": [[1, 1]], "mixed": 1, "token": 0, "hue": 1}}',
        '{"model": {"name": "x", "decode": [], "mixed": 1, "token": 0}}',
        '{"model": {"name": "x", "decode": [1], "mixed": 1, "token": 0}}',
        '{"model": {"name": "x", "decode": [[1, "1"]], "mixed": 1, "token": 0}}',
    ],
)
def test_a_file_that_is_no_cost_model(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text, "latin-1")
    with pytest.raises(ConfigError, match=f"{path}: this is no cost model"):
        read_cost(path)
