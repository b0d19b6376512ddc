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
    found, about = fit(measured(1), "x")
    assert abs(about["held_out_error"]["total"]) < 1e-3
    assert about["held_out_error"]["step"] < 1e-2
    for other in (measured(2), measured(3)):
        top = found.decode[-1][0]  # of the rows that there were often enough
        emitted = [
            _seconds(found, step) / step.seconds for step in other if step.rows <= top
        ]
        assert len(emitted) > 0.98 * len(other)
        assert min(emitted) > 0.98
        assert max(emitted) < 1.02


@pytest.mark.long
def test_a_fit_finds_what_launches_take_the_host() -> None:
    """Whose steps before them seem longer, and they themselves shorter."""
    known = evolve(COST, launch=0.03, captured=600, eager=0.002, eager_token=3e-5)
    found, about = fit(measured(1, cost=known), "x")
    assert abs(about["held_out_error"]["total"]) < 1e-2
    assert found.launch == pytest.approx(known.launch, rel=0.02)
    assert 540 <= found.captured <= 620
    assert found.eager + 1000 * found.eager_token == pytest.approx(0.032, rel=0.03)
    assert found.mixed + 300 * found.token == pytest.approx(0.013, rel=0.03)
    for limit in (0, 20_000):  # all launches take long, or none
        fitted, _ = fit(measured(1, cost=evolve(known, captured=limit)), "x")
        assert fitted.launch == (pytest.approx(0.03, rel=0.02) if limit == 0 else 0)
        assert fitted.captured == 0


def _seconds(cost: CostModel, step: MeasuredStep) -> float:
    buckets = (each for top, each in cost.decode if step.rows <= top)
    base = next(buckets, cost.decode[-1][1]) if step.rows else cost.mixed
    of_rows = (cost.token, cost.sequence, cost.chunk)
    rates = (*of_rows, cost.context, cost.attention, cost.draft)
    done = zip(rates, astuple(step.work), strict=True)
    return base + math.fsum(rate * much for rate, much in done)


@pytest.mark.long
def test_interruptions_do_not_spoil_a_fit() -> None:
    rng = Random(0)
    noisy = []
    for one in measured(1):
        noise = rng.lognormvariate(0, 0.1) * (30 if rng.random() < 0.02 else 1)
        noisy.append(evolve(one, seconds=one.seconds * noise))
    found, about = fit(noisy, "x")
    clean = measured(2)
    emitted = sum(_seconds(found, step) for step in clean)
    took = sum(step.seconds for step in clean)
    assert emitted / took == pytest.approx(1, abs=0.03)
    assert about["held_out_error"]["step"] == pytest.approx(0.067, abs=0.02)


def test_steps_that_take_longer_now_and_then_are_in_the_total() -> None:
    rng = Random(0)
    noisy = [
        evolve(one, seconds=one.seconds * (1.4 if rng.random() < 0.05 else 1))
        for one in measured(1)
    ]
    found, _ = fit(noisy, "x")
    emitted = sum(_seconds(found, step) for step in noisy)
    took = sum(step.seconds for step in noisy)
    assert emitted == pytest.approx(took, rel=0.005)


def test_nothing_is_below_zero_and_too_few_steps_are_refused() -> None:
    rng = Random(1)
    noise = [evolve(one, seconds=0.01 * rng.random() + 1e-4) for one in measured(1)]
    found, _ = fit(noise, "x")
    assert min(found.token, found.sequence, found.chunk, found.context, found.mixed) >= 0
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
    other = (
        "--max-num-seqs",
        "16",
        "--max-num-batched-tokens",
        "2048",
        "--num-blocks",
        "2000",
    )
    found = reported(
        capsys,
        text.format(2),
        "--fit",
        str(tmp_path / "1.journal"),
        "--save-cost",
        str(cost),
        "--max-model-len",
        "20000",
        *other,
    )
    assert found["ran"] == {"model": "m"}
    assert abs(found["held_out_error"]["total"]) < 1e-3
    run = found["runs"][0]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for share in ("p50", "p99"):
            assert run[name][share] == pytest.approx(real[2][name][share], rel=0.02)
    again = reported(
        capsys, text.format(2), "--cost", str(cost), "--max-model-len", "20000", *other
    )
    assert again["runs"][0]["ttft"] == run["ttft"]
    assert "on steps held out" in again["cost"]["name"]


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
