"""`minfer simulate` with seeds, groups, replicas and tiers; its files; recorded runs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from minfer.effects.cli.main import main
from minfer.effects.live.journal.journal_files import write_journal
from minfer.effects.runs import simulate_command
from minfer.effects.runs.costs import H200
from minfer.effects.runs.simulate_compare import difference_lines, differences
from minfer.effects.runs.simulate_recorded import CLOSED_LOOP
from minfer.effects.runs.simulate_run import run as run_once
from minfer.records.config import EngineConfig
from minfer.records.messages import Emit
from minfer.records.request import Request
from minfer.records.state import Turn
from minfer.simulation.cost import CostModel
from minfer.simulation.simulate import ArrivalQueue, Simulated, Simulation
from tests.circles import long

BUSY = "poisson:rate=12,requests=40,prompt=300,output=30,spread=0.9,seed=2"
FULL = ("--max-num-seqs", "3")
TWO = ("--scheduling-policy", "fcfs", "--scheduling-policy", "shortest")


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What the command prints as JSON."""
    assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that the command prints."""
    assert main(["simulate", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


# --- seeds ------------------------------------------------------------------------------


@pytest.mark.long
def test_what_differs_and_what_is_noise(capsys: pytest.CaptureFixture[str]) -> None:
    """Shorter requests first: half of the requests wait less in every load."""
    load = "poisson:rate=60,requests=50,prompt=300,output=30,spread=1.3"
    options = (load, *FULL, *TWO, "--seeds", "8", "--mix", "1")
    results = reported(capsys, *options)
    assert [run["seed"] for run in results["runs"]] == [*range(8), *range(8)]
    pairs = zip(results["runs"][:8], results["runs"][8:], strict=True)
    gaps = sorted(b["ttft"]["p50"] - a["ttft"]["p50"] for a, b in pairs)
    [compared] = results["differences"]
    assert (compared["from"], compared["to"]) == ("fcfs", "shortest")
    by_title = {figure["figure"]: figure for figure in compared["figures"]}
    assert by_title["TTFT p50"]["verdict"] == "lower"
    assert by_title["TTFT p50"]["low"] == gaps[0]
    assert by_title["TTFT p50"]["high"] == gaps[-1]
    assert by_title["preempted"]["verdict"] == "equal"
    assert "noise" in {figure["verdict"] for figure in compared["figures"]}
    assert "TTFT p99, priority -1" in by_title
    lines = shown(capsys, *options)
    assert any("8 seeds, 0 to 7; rows are medians; each seed" in line for line in lines)
    assert "shortest, from fcfs:" in lines
    assert any(line.startswith("    priority -1: ") for line in lines)
    assert any("noise (lower in " in line for line in lines)


def test_where_nothing_waits_policies_cannot_differ(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = "poisson:rate=1,requests=6,prompt=30,output=3"
    lines = shown(capsys, quiet, *TWO)
    assert lines[-2].startswith("no request ever waited, in any run: no queue formed")
    assert lines[-1] == (
        "fcfs and shortest decided alike: the same admissions, preemptions and ends at "
        "the same times"
    )
    remarks = reported(capsys, BUSY, *FULL, *TWO)["remarks"]
    assert remarks == []


TINY = "poisson:rate=60,requests=6,prompt=30,output=3,spread=1"
SIX = ("--seeds", "6", "--mix", "1")


def seeds_and_times(results: Any) -> tuple[list[int], list[float]]:
    """The seeds of the runs of one policy, and the medians of their first tokens."""
    runs = results["runs"]
    return [run["seed"] for run in runs], [run["ttft"]["p50"] for run in runs]


@pytest.mark.long
def test_the_set_of_seeds_begins_with_the_one_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds, times = seeds_and_times(reported(capsys, f"{TINY},seed=100", *SIX))
    by_option = reported(capsys, TINY, "--first-seed", "100", *SIX)
    assert seeds_and_times(by_option) == (seeds, times)
    assert seeds == [*range(100, 106)]
    [run] = reported(capsys, f"{TINY},seed=102", "--mix", "103")["runs"]
    assert run["ttft"]["p50"] == times[2]
    assert seeds_and_times(reported(capsys, TINY, *SIX))[1] != times
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 30 * k, "input_length": 9 * k, "output_length": 3, "hash_ids": [k]}
        for k in range(1, 30)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    sets = [
        seeds_and_times(reported(capsys, str(trace), *SIX, *options))
        for options in ((), ("--first-seed", "1"), ("--first-seed", "6"))
    ]
    assert sets[0][1][1:] == sets[1][1][:5]
    assert sets[0][1] != sets[2][1]


@pytest.mark.long
def test_an_interrupted_run_compares_what_is_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = list[str]()

    def run_or_stop(*arguments: Any, **named: Any) -> Any:
        if len(names) == last:
            raise KeyboardInterrupt
        names.append(named["name"])
        return run_once(*arguments, **named)

    monkeypatch.setattr(simulate_command, "run", run_or_stop)
    last = 13  # in the middle of the seventh seed
    assert main(["simulate", TINY, *TWO, "--seeds", "9"]) == 130
    out = capsys.readouterr().out
    assert "shortest, from fcfs:" in out
    assert "lower in 0 of 6" in out
    assert "interrupted: all figures are of the first 6 of 9 seeds" in out
    names.clear()
    last = 11  # five seeds are too few
    assert main(["simulate", TINY, *TWO, "--seeds", "9"]) == 130
    assert "from fcfs" not in capsys.readouterr().out
    assert names[:3] == [f"{TINY}, seed 0", f"{TINY}, seed 0", f"{TINY}, seed 1"]


@pytest.mark.parametrize(
    ("before", "gaps", "expected"),
    [
        (500.0, (-0.2, -0.3, -0.7), "500 -0.3 [-0.7, -0.2] lower, by 0.06% ("),
        (500.0, (-0.002, -0.3, -0.7), "500 -0.300 [-0.700, -0.002] lower, by 0.06% ("),
        (500.0, (-0.1, -0.01, 0.2), "500 +0.0 [-0.1, +0.2] noise ("),
        (500.0, (-0.1, 0.0, 0.0), "500 +0.0 [-0.1, +0.0] noise ("),
        (500.0, (0.0, 0.0, 0.0), "500 +0 [+0, +0] equal ("),
        (500.0, (1e-9, 0.02, 7.0), "higher, by less than 0.01% ("),
        (500.0, (-7.0, -6.0, -5.0), "500 -6 [-7, -5] lower ("),
        (500.0, (-4.0, -3.0, -2.0), "500 -3 [-4, -2] lower, by 0.60% ("),
        (0.0, (0.1, 0.2, 0.3), "0 +0.2 [+0.1, +0.3] higher ("),
    ],
)
def test_small_differences_are_readable(
    before: float, gaps: tuple[float, float, float], expected: str
) -> None:
    low, middle, high = sorted(gaps)
    baseline = [{"tokens_per_second": before, "groups": {}}] * 7
    draws = (low, middle, middle, middle, middle, middle, high)
    others = [{"tokens_per_second": before + gap, "groups": {}} for gap in draws]
    _, line = difference_lines("other", differences(baseline, others), 7)
    assert expected in " ".join(line.split())


# --- replicas and tiers -----------------------------------------------------------------


def test_replicas_behind_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    shared = f"{BUSY},shared=1,prefix=200,prefixes=4"
    by_routing = {
        routing: reported(capsys, shared, *FULL, "--replicas", "3", "--routing", routing)
        for routing in ("prefix", "round_robin")
    }
    [one] = reported(capsys, shared, *FULL)["runs"]
    runs = {routing: results["runs"][0] for routing, results in by_routing.items()}
    assert {run["samples"] for run in runs.values()} == {40}
    assert {run["output_tokens"] for run in runs.values()} == {one["output_tokens"]}
    assert runs["prefix"]["replicas"] == 3
    assert runs["prefix"]["hit_share"] > runs["round_robin"]["hit_share"]
    assert all(run["ttft"]["p99"] < one["ttft"]["p99"] for run in runs.values())


def test_a_host_tier_keeps_what_the_pool_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared = (
        "poisson:rate=2,requests=30,prompt=900,output=8,shared=1,prefix=640,prefixes=5"
    )
    pool = (shared, "--num-blocks", "20", "--block-size", "64")
    [alone] = reported(capsys, *pool)["runs"]
    [tiered] = reported(capsys, *pool, "--host-blocks", "500")["runs"]
    assert tiered["hit_share"] > alone["hit_share"] + 0.1
    lines = shown(capsys, *pool, "--host-blocks", "500")
    assert any(line.startswith("moving a block to or from host memory") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--seeds", "5"], "--seeds must be 6 or more, not 5: with fewer no interval"),
        (["--first-seed", "6"], "--first-seed needs --seeds: how many there are"),
        (["--seeds", "6", "--first-seed", "3"], "seed=2 gives the first seed, too"),
        (["--seeds", "6", "--journal", "x"], "--seeds goes neither with --find nor"),
        (["--replicas", "2", "--journal", "x"], "--journal is of one engine"),
        (
            ["--replicas", "2", "--num-speculative-tokens", "2"],
            "drafts are simulated of one engine",
        ),
        (["--host-page-seconds", "1"], "--host-page-seconds needs --host-blocks"),
        (["--plot", "x.gif"], "--plot x.gif: its name must end in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_combined(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", BUSY, *arguments]) == 2
    assert expected in capsys.readouterr().err


# --- files ------------------------------------------------------------------------------


@pytest.mark.long
def test_figures_as_csv_and_as_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    table, plot = tmp_path / "runs.csv", tmp_path / "runs.svg"
    files = ["--csv", str(table), "--plot", str(plot)]
    runs = reported(capsys, BUSY, *FULL, *TWO, "--mix", "3", *files)["runs"]
    rows = [*csv.DictReader(table.read_text("utf-8").splitlines())]
    assert [row["policy"] for row in rows] == ["fcfs", "shortest"]
    for row, run in zip(rows, runs, strict=True):
        assert float(row["ttft.p99"]) == run["ttft"]["p99"]
        assert int(row["groups.client.big.samples"]) > 0
    text = plot.read_text("utf-8")
    assert "TTFT p99" in text
    assert "shortest" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--csv", "none/a.csv"), "--csv none/a.csv: its folder is not there"),
        (("--csv", "."), "--csv .: this is a folder"),
        (("--plot", "none/a.png"), "--plot none/a.png: its folder is not there"),
        (("--save-cost", "none/a"), "--save-cost none/a: its folder is not there"),
        (("--routing", "prefix"), "add --replicas"),
    ],
)
def test_what_cannot_be_written_or_does_nothing_is_refused_before_a_run(
    words: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "poisson:requests=1", *words]) == 2
    out, error = capsys.readouterr()
    assert reason in error
    assert not out


# --- recorded runs ----------------------------------------------------------------------

RECORDED = EngineConfig(num_blocks=400, max_num_seqs=4, max_model_len=400)


def _write_run(path: Path, turns: Any) -> None:
    write_journal(path, RECORDED, turns, {"device": "CPU"})


def _open_loop(cost: CostModel) -> list[Turn]:
    arrivals = [
        (
            0.11 * (k * k % 17) / 8 + 0.1 * k,
            Request(id=f"{k}", prompt=(7,) * 90, max_tokens=20),
        )
        for k in range(40)
    ]
    arrivals.sort(key=lambda arrival: arrival[0])
    return [*Simulation(RECORDED, Simulated(), cost, arrivals).turns()]


def _closed_loop(clients: int) -> list[Turn]:
    """Clients that send a request as soon as they have an answer."""
    queue, turns = ArrivalQueue(), list[Turn]()
    for k in range(clients):
        queue.append((0.0, Request(id=f"{k}", prompt=(7,) * 90, max_tokens=10 + k)))
    number = clients
    for turn in Simulation(RECORDED, Simulated(), H200, queue).turns():
        turns.append(turn)
        emits = [c for c in turn.transition.commands if isinstance(c, Emit)]
        for _ in [finished for emit in emits for finished in emit.finished]:
            if number < 40:
                request = Request(
                    id=f"{number}", prompt=(7,) * 90, max_tokens=10 + number % 9
                )
                queue.append((turn.transition.state.time, request))
                number += 1
    return turns


def test_the_recorded_row_is_beside_the_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    _write_run(path, _open_loop(H200))
    results = reported(capsys, str(path), "--cost", "h200")
    assert results["recorded"]["policy"] == "recorded"
    assert results["recorded"]["ttft"] == results["runs"][0]["ttft"]
    assert results["remarks"] == []
    assert not results["closed_loop"]
    lines = shown(capsys, str(path), "--cost", "h200")
    assert [line.split()[0] for line in lines[-2:]] == ["recorded", "fcfs"]
    other = shown(capsys, str(path), "--cost", "h200", "--scheduling-policy", "fair")
    assert other[-1].startswith("no simulated row has the recorded settings")


def test_a_baseline_that_misses_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    slow = CostModel(name="slow", decode=((1, 0.02),), mixed=0.03, token=1e-5)
    _write_run(path, _open_loop(slow))
    lines = shown(capsys, str(path), "--cost", "h200")
    assert lines[-1].startswith("warning: with the recorded settings the simulator miss")
    assert "TPOT p50 -" in lines[-1]


@pytest.mark.parametrize("clients", [4, *long([1, 6])])
def test_closed_loops_are_recognized(
    clients: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    _write_run(path, _closed_loop(clients))
    assert CLOSED_LOOP in reported(capsys, str(path), "--cost", "h200")["remarks"]


def test_a_cost_of_another_device_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.journal"
    _write_run(path, _open_loop(H200)[:60])
    lines = shown(capsys, str(path))
    assert "and ran on CPU: these are not the times of that device" in lines[2]
