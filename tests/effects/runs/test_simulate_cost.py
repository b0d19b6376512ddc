"""A simulation says what it goes by: a run's own costs, a file's, or built-in ones."""

from pathlib import Path

import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs.costs import H200, write_cost
from minfer.effects.runs.simulate_command import _good_columns
from minfer.effects.runs.trace_files import read_trace
from minfer.records.config import EngineConfig
from minfer.simulation.simulate import Simulated, Simulation
from tests.effects.runs.test_simulate_command import COST, SMALL, reported

RAN = {"model": "/models/small", "device": "a GPU", "executor": "torch"}


def run_of(path: Path, requests: int) -> Path:
    """A journal of so many requests, whose steps cost what `COST` says."""
    trace = read_trace(f"poisson:rate=12,requests={requests},prompt=300,output=30,seed=2")
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_model_len=2000)
    simulation = Simulation(config, Simulated(), COST, trace.arrivals(config.block_size))
    write_journal(path, config, simulation.turns(), RAN)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("runs") / "run.journal", 60)


def heading(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()[:4]


def test_a_run_is_simulated_at_its_own_cost(
    ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, cost, cost_source, sizes = heading(capsys, str(ran))
    assert cost.startswith(f"what steps cost: fitted to {ran}; on steps held out ")
    assert cost_source == (
        "  what ran there: /models/small, a GPU, torch; --cost h200 takes the built-in "
        "model"
    )
    assert sizes == (
        "sizes: 2,000 blocks of 64 tokens, 16 sequences at once, 2,048 tokens a step; "
        "those that no option gives, and the policy, are recorded"
    )
    fitted = reported(capsys, str(ran), "--requests", "30")
    assert fitted["cost"]["token"] == pytest.approx(COST.token, rel=0.1)
    assert abs(fitted["held_out_error"]["total"]) < 0.02
    assert fitted["ran"]["model"] == "/models/small"
    # That is another prediction than of a 7B model on an H200.
    built_in = reported(capsys, str(ran), "--requests", "30", "--cost", "h200")
    assert built_in["cost"]["name"] == H200.name
    own_tpot, built_in_tpot = (
        results["runs"][0]["tpot"]["p50"] for results in (fitted, built_in)
    )
    assert own_tpot > 1.2 * built_in_tpot


def test_a_run_of_few_steps_says_that_it_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = run_of(tmp_path / "short.journal", 3)
    _, cost, cost_source, _ = heading(capsys, str(short))
    assert cost == f"what steps cost: {H200.name}"
    assert cost_source.startswith(
        "  the run has fewer than the 256 steps that a cost model"
    )
    with pytest.raises(SystemExit):
        main(["simulate", str(short), "--cost"])
    capsys.readouterr()
    assert main(["simulate", SMALL, "--fit", str(short)]) == 2  # who asks for it is told
    assert "steps are too few to fit" in capsys.readouterr().err


def test_the_request_is_reported(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cost.json"
    write_cost(file, COST, {})
    options = (SMALL, "--requests", "5")
    assert heading(capsys, *options, "--cost", str(file))[1:3] == [
        "what steps cost: known",
        f"  read from {file} (--cost)",
    ]
    assert heading(capsys, *options, "--cost", "h200")[2] == "  as --cost h200 says"
    assert heading(capsys, *options, "--fit", str(ran))[2].endswith(
        "torch; as --fit says"
    )


def test_goodput_is_reported_in_words() -> None:
    assert _good_columns(float("inf"), float("inf")).startswith(
        "good: the share of answers that ended well; --slo-ttft and --slo-tpot say"
    )
    assert _good_columns(2, 0.05) == (
        "good: the share of answers whose first token came within 2 s and whose other "
        "tokens took at most 0.05 s each, on average; good/s: as many of them a second "
        "(goodput)"
    )
